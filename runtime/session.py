"""What the diffusion loop needs of whatever runs the network: the session protocol and the rows of a pass.

A session keeps the KV caches, one slot a request; who uses it decides which slot is whose. A pass takes two groups of rows:
context rows (a prompt chunk, or a finished canvas being committed; causal; their keys and values are appended to the slot's
cache) and canvas rows (being denoised; bidirectional; nothing kept). Either group may be empty, and a slot may appear in both:
its context rows are then written to the cache before its canvas rows attend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Limits:
    """What a session was built for; `max_context` counts every position of a request, its last canvas included."""

    max_batch: int
    max_context: int
    prefill_chunk: int
    canvas_length: int


@dataclass(frozen=True)
class Rows:
    """Consecutive tokens of the request in cache slot `slot`, the first at position `start`. ids: int64 [n], n >= 1."""

    slot: int
    start: int
    ids: Tensor


@dataclass(frozen=True)
class ContextRows(Rows):
    """Tokens to append to the cache."""


@dataclass(frozen=True)
class CanvasRows(Rows):
    """One canvas to denoise by one step, its first token at position `start`.

    ids: int64 [T]. soft_embeddings: [T, hidden], what the previous step of this canvas returned; None at the first step.
    temperature: divides the logits, above 0. uniform: float32 [T] in [0, 1), one draw a position.
    """

    soft_embeddings: Tensor | None
    temperature: float
    uniform: Tensor


@dataclass(frozen=True)
class CanvasResult:
    """What a denoising step says of one canvas; z are the logits divided by the temperature.

    best_ids: int64 [T], argmax of z. sampled_ids: int64 [T], a draw from softmax(z). entropy: float32 [T], of softmax(z), in
    nats. best_logprob: float32 [T], log softmax(z) at best_ids. soft_embeddings: [T, hidden], softmax(z) times the scaled
    embedding table, for the next step.
    """

    best_ids: Tensor
    sampled_ids: Tensor
    entropy: Tensor
    best_logprob: Tensor
    soft_embeddings: Tensor


class Session(Protocol):
    """Runs passes of the mixed network and keeps the KV cache of each slot."""

    @property
    def limits(self) -> Limits:
        """What this session was made for."""
        ...

    def run(self, context: Sequence[ContextRows], canvases: Sequence[CanvasRows]) -> list[CanvasResult]:
        """One pass; a slot appears at most once in each group. The results are in the order of `canvases`."""
        ...

    def reset(self, slot: int) -> None:
        """Forgets what the cache of `slot` holds."""
        ...
