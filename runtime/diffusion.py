"""One request as a state machine: what it contributes to each pass, and what it makes of the result.

    prompt chunks … | last chunk + first step | step … step | commit + first step of the next canvas | step … | end

The last prompt chunk shares its pass with the first denoising step, and so does the commit of a canvas with the first step of
the next: the weights are read once for both. The last canvas is never committed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from dgemma_trt.config import GenerationConfig
from dgemma_trt.errors import UserError
from dgemma_trt.runtime import randomness, sampler
from dgemma_trt.runtime.randomness import Purpose
from dgemma_trt.runtime.session import CanvasResult, CanvasRows, ContextRows, Limits


@dataclass(frozen=True)
class GenerationParameters:
    """How one request is generated.

    max_new_tokens: exact limit; None: up to the context limit. temperature: 1 is the checkpoint's schedule, 0 takes the argmax
    in place of the draw, anything else multiplies t_min and t_max. entropy_bound and confidence_threshold are in nats.
    """

    end_token_ids: tuple[int, ...]
    max_denoising_steps: int
    entropy_bound: float
    t_min: float
    t_max: float
    stability_threshold: int
    confidence_threshold: float
    max_new_tokens: int | None = None
    temperature: float = 1.0
    seed: int = 0

    @classmethod
    def of(cls, config: GenerationConfig, **wanted: Any) -> GenerationParameters:
        """The checkpoint's parameters with those in `wanted` replaced; None keeps the checkpoint's.

        Raises:
            UserError: an unknown parameter, or a value outside its range.
        """
        unknown = sorted(wanted.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            raise UserError(f"{unknown[0]} is no generation parameter; known: {', '.join(cls.__dataclass_fields__)}")
        given = {name: value for name, value in wanted.items() if value is not None}
        parameters = cls(**{**vars(config), **given})
        randomness.check_seed(parameters.seed)
        for name, lowest, highest in _WHOLE:
            value = getattr(parameters, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and lowest <= value <= highest):
                raise UserError(f"{name} is {value!r}; it must be a whole number from {lowest} to {highest}")
        for name, least, most in _REAL:
            value = getattr(parameters, name)
            real = isinstance(value, int | float) and not isinstance(value, bool)
            if not (real and (least <= value <= most or (name == "temperature" and value == 0))):
                raise UserError(f"{name} is {value!r}; it must be {'0, or ' * (name == 'temperature')}from {least} to {most}")
        ends = parameters.end_token_ids
        if not isinstance(ends, tuple | list) or not all(isinstance(token, int) for token in ends):
            raise UserError(f"end_token_ids is {ends!r}; it must be a list of token ids")
        if parameters.t_min > parameters.t_max:
            raise UserError(f"t_min is {parameters.t_min}, above t_max {parameters.t_max}")
        return parameters


_WHOLE = (("max_new_tokens", 1, 2**31 - 1), ("max_denoising_steps", 1, 1_000_000), ("stability_threshold", 0, 1_000_000))
_REAL = (
    ("entropy_bound", 1e-9, 1e9),
    ("confidence_threshold", 1e-9, 1e9),
    # Logits are at most 30 or so: beyond these their quotients mean nothing, or overflow.
    ("t_min", 1e-3, 1e3),
    ("t_max", 1e-3, 1e3),
    ("temperature", 1e-2, 1e2),
)


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
    """A finished canvas. token_ids: before the end token, and within the limit. converged: stopped before the last step."""

    canvas: int
    token_ids: list[int]
    steps: int
    converged: bool


@dataclass(frozen=True)
class End:
    """The last event of a request.

    finish_reason: `stop` (end token), `length` (limit reached) or `error`, which `error` then explains.
    """

    finish_reason: str
    error: str | None = None


Event = Draft | Committed | End


@dataclass
class Statistics:
    """Per canvas: denoising steps, tokens that are not padding (the end token counts), positions accepted at each step."""

    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens that are not padding, of whole canvases, over denoising steps: the reference's definition."""
        return sum(self.tokens) / max(1, sum(self.steps))


class Phase(Enum):
    """Where a request stands: prompt chunks that pass alone; canvases; over."""

    PREFILL = "prefill"
    DENOISE = "denoise"
    FINISHED = "finished"


@dataclass
class _Canvas:
    """The state of one canvas; each begins with a new one, so that nothing is left over from the last.

    ids: int64 [T]. soft_embeddings: [T, hidden] of the previous step. step: the one to run next, from 1.
    """

    index: int
    start: int
    ids: Tensor
    stopping: sampler.Stopping
    soft_embeddings: Tensor | None = None
    step: int = 1


class Request:
    """A prompt being answered. Alternate `next_rows` and `take` until `phase` is FINISHED."""

    def __init__(
        self,
        prompt: list[int],
        parameters: GenerationParameters,
        limits: Limits,
        vocab_size: int,
        pad_token_id: int | None = None,
    ) -> None:
        """Checks the prompt. pad_token_id: not counted in the statistics.

        Raises:
            UserError: an empty prompt, one that leaves no room for an answer, or a token id outside the vocabulary.
        """
        if not prompt:
            raise UserError("the prompt is empty; give at least one token")
        if len(prompt) >= limits.max_context:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, the limit is {limits.max_context} with the answer; shorten it, or build "
                "with a larger --max-context"
            )
        if not all(0 <= token < vocab_size for token in prompt):
            raise UserError(f"the prompt has a token id outside 0 … {vocab_size - 1}")
        self.parameters = parameters
        self.statistics = Statistics()
        self.phase = Phase.PREFILL
        self._limits, self._vocab_size, self._pad_token_id = limits, vocab_size, pad_token_id
        self._uncached, self._cached = torch.tensor(prompt), 0
        self._emitted = 0
        self._end_prefill_before_last_chunk()

    def next_rows(self, slot: int) -> tuple[ContextRows | None, CanvasRows | None]:
        """What this request contributes to the next pass, in cache slot `slot`; the same until `take`."""
        chunk = self._chunk()
        context = ContextRows(slot, self._cached, chunk) if len(chunk) else None
        return context, self._canvas_rows(slot) if self.phase is Phase.DENOISE else None

    def take(self, result: CanvasResult | None) -> list[Event]:
        """Takes in the result of the pass (None if it had no canvas rows of this request)."""
        count = len(self._chunk())
        self._uncached, self._cached = self._uncached[count:], self._cached + count
        if result is None:
            self._end_prefill_before_last_chunk()
            return []
        return self._denoise(self._canvas, result)

    def _chunk(self) -> Tensor:
        """The ids that enter the cache with the next pass. Prompt chunks end on a fixed grid, and a canvas stays whole: a
        token's keys, which depend in their last bits on the rows computed together, are the same whoever cuts."""
        if self.phase is Phase.PREFILL:
            return self._uncached[: self._to_grid()]
        return self._uncached

    def _to_grid(self) -> int:
        return self._limits.prefill_chunk - self._cached % self._limits.prefill_chunk

    def _end_prefill_before_last_chunk(self) -> None:
        if len(self._uncached) <= self._to_grid():
            self.phase = Phase.DENOISE
            self._start_canvas(0)

    def _start_canvas(self, index: int) -> None:
        start = self._cached + len(self._uncached)
        length = min(self._limits.canvas_length, self._limits.max_context - start)
        ids = self._noise(Purpose.INITIAL_CANVAS, index, 0, length)
        stopping = sampler.Stopping(self.parameters.stability_threshold, self.parameters.confidence_threshold)
        self._canvas = _Canvas(index, start, ids, stopping)
        self.statistics.accepted.append([])

    def _noise(self, purpose: Purpose, canvas: int, step: int, length: int) -> Tensor:
        return randomness.tokens(self.parameters.seed, canvas, step, purpose, length, self._vocab_size)

    def _canvas_rows(self, slot: int) -> CanvasRows:
        canvas, chosen, steps = self._canvas, self.parameters, self.parameters.max_denoising_steps
        scale = chosen.temperature or 1.0
        temperature = sampler.schedule_temperature(steps - canvas.step + 1, steps, chosen.t_min * scale, chosen.t_max * scale)
        uniform = randomness.uniforms(chosen.seed, canvas.index, canvas.step, Purpose.SAMPLE, len(canvas.ids))
        return CanvasRows(slot, canvas.start, canvas.ids, canvas.soft_embeddings, temperature, uniform)

    def _denoise(self, canvas: _Canvas, result: CanvasResult) -> list[Event]:
        for name in ("entropy", "best_logprob"):
            if not bool(getattr(result, name).isfinite().all()):
                self.phase = Phase.FINISHED
                where = f"canvas {canvas.index + 1}, step {canvas.step}"
                return [End("error", f"{name} is not finite in {where}; the engine or its weights are damaged")]
        best, entropy = result.best_ids.cpu(), result.entropy.cpu()
        accepted = sampler.accept(entropy, self.parameters.entropy_bound)
        self.statistics.accepted[-1].append(int(accepted.sum()))
        draft = Draft(canvas.index, canvas.step, best.tolist(), accepted, entropy)
        stopped = canvas.stopping.update(best, entropy)
        if stopped or canvas.step == self.parameters.max_denoising_steps:
            return [draft, *self._finish_canvas(canvas, best, stopped)]
        chosen = best if self.parameters.temperature == 0 else result.sampled_ids.cpu()
        canvas.ids = torch.where(accepted, chosen, self._noise(Purpose.RENOISE, canvas.index, canvas.step, len(best)))
        canvas.soft_embeddings = result.soft_embeddings
        canvas.step += 1
        return [draft]

    def _finish_canvas(self, canvas: _Canvas, best: Tensor, converged: bool) -> list[Event]:
        tokens, ended = sampler.before_end(best.tolist(), self.parameters.end_token_ids)
        self.statistics.steps.append(canvas.step)
        self.statistics.tokens.append(sum(token != self._pad_token_id for token in tokens) + ended)
        limit = self.parameters.max_new_tokens
        if limit is not None:
            left = limit - self._emitted
            ended = ended and len(tokens) < left
            tokens = tokens[:left]
        self._emitted += len(tokens)
        committed = Committed(canvas.index, tokens, canvas.step, converged)
        full = canvas.start + len(best) >= self._limits.max_context
        if ended or full or self._emitted == limit:
            self.phase = Phase.FINISHED
            return [committed, End("stop" if ended else "length")]
        self._uncached = best
        self._start_canvas(canvas.index + 1)
        return [committed]
