"""What a request tells its caller while it runs: drafts, committed canvases, the end; and its statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""An end token or stop string; the limit; the caller's wish; a fault."""


@dataclass(frozen=True)
class Draft:
    """A canvas after one denoising step; committed text may still differ.

    canvas: index from 0. step: from 1. token_ids: the argmax, [T]. accepted: bool [T], what the next step keeps. entropy:
    float32 [T], nats.
    """

    canvas: int
    step: int
    token_ids: list[int]
    accepted: Tensor
    entropy: Tensor

    @property
    def mean_entropy(self) -> float:
        """In nats."""
        return float(self.entropy.mean())


@dataclass(frozen=True)
class Committed:
    """A finished canvas.

    token_ids: before the end token, and within the limit; with a stop string, up to the token that completed it. text: what
    became certain with this canvas; the texts of all canvases together are the answer. logprobs: of each token, nats, under the
    distribution of the last denoising step. converged: stopped before the last step.
    """

    canvas: int
    token_ids: list[int]
    text: str
    logprobs: list[float]
    steps: int
    converged: bool


@dataclass(frozen=True)
class End:
    """The last event of a request; `error` explains the reason of that name."""

    finish_reason: FinishReason
    error: str | None = None


Event = Draft | Committed | End


@dataclass
class Statistics:
    """Of one request. Per canvas: denoising steps, tokens that are not padding (the end token counts), positions accepted at
    each step. emitted: tokens given out. preemptions: times its context was computed again. Seconds count from its submission:
    to its first pass, to its first committed canvas, to its end; None until then."""

    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)
    emitted: int = 0
    preemptions: int = 0
    seconds_to_start: float | None = None
    seconds_to_first_canvas: float | None = None
    seconds: float | None = None

    @property
    def tokens_per_forward(self) -> float:
        """Tokens that are not padding, of whole canvases, over denoising steps: the reference's definition."""
        return sum(self.tokens) / max(1, sum(self.steps))

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the time from submission to end; 0 before the end."""
        return self.emitted / self.seconds if self.seconds else 0.0
