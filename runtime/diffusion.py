"""One request as a state machine: what it contributes to each pass, and what it makes of the result.

    prompt chunks … | last chunk + first step | step … step | commit + first step of the next canvas | step … | end

The last prompt chunk shares its pass with the first denoising step, and so does the commit of a canvas with the first step of
the next: the weights are read once for both. The last canvas is never committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from dgemma_trt.errors import UserError
from dgemma_trt.runtime import randomness, sampler
from dgemma_trt.runtime.events import Committed, Draft, End, Event, FinishReason, Statistics
from dgemma_trt.runtime.parameters import GenerationParameters
from dgemma_trt.runtime.randomness import Purpose
from dgemma_trt.runtime.session import CanvasResult, CanvasRows, ContextRows, Limits
from dgemma_trt.runtime.text_stream import Decode, TextStream


class Phase(Enum):
    """Where a request stands."""

    PREFILL = "prefill"
    """Context enters the cache in passes of its own."""
    DENOISE = "denoise"
    """Each pass is a denoising step; the first may take in the last piece of context."""
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
    """A prompt being answered. Alternate `next_rows` and `take` until `phase` is FINISHED.

    Its context is a list of pieces, each of which enters the cache whole: prompt chunks on a fixed grid, then a canvas each. A
    token's keys depend in their last bits on the rows computed together; so they are the same whenever they are computed, and
    computed again.
    """

    def __init__(
        self,
        prompt: list[int],
        parameters: GenerationParameters,
        limits: Limits,
        vocab_size: int,
        pad_token_id: int | None = None,
        decode: Decode | None = None,
        fuse: bool = True,
    ) -> None:
        """Checks the prompt.

        pad_token_id: not counted in the statistics. decode: makes the text; None: there is none. fuse: whether the last piece
        of context shares its pass with a denoising step.

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
        if parameters.stop and decode is None:
            raise UserError("stop strings need a tokenizer")
        self.parameters = parameters
        self.statistics = Statistics()
        self.phase = Phase.PREFILL
        self.context_length = len(prompt)
        self.cached = 0
        self._limits, self._vocab_size, self._pad_token_id, self._fuse = limits, vocab_size, pad_token_id, fuse
        self._text = None if decode is None else TextStream(decode, parameters.stop)
        self._pieces = list(torch.tensor(prompt).split(limits.prefill_chunk))
        self._entered = 0
        self._canvas = self._new_canvas(0)
        self._choose_phase()

    @property
    def next_context(self) -> int:
        """How many tokens of context the next pass takes in."""
        return len(self._pieces[self._entered]) if self._entered < len(self._pieces) else 0

    @property
    def between_canvases(self) -> bool:
        """Whether no denoising step of the current canvas has run, so that `compute_again` costs no step."""
        return self._canvas.step == 1

    @property
    def most_left(self) -> int:
        """The most tokens that it may still emit."""
        room = self._limits.max_context - self._canvas.start
        limit = self.parameters.max_new_tokens
        return room if limit is None else min(room, limit - self.statistics.emitted)

    def next_rows(self, slot: int) -> tuple[ContextRows | None, CanvasRows | None]:
        """What this request contributes to the next pass, in cache slot `slot`; the same until `take`."""
        context = ContextRows(slot, self.cached, self._pieces[self._entered]) if self.next_context else None
        return context, self._canvas_rows(slot) if self.phase is Phase.DENOISE else None

    def take(self, result: CanvasResult | None) -> list[Event]:
        """Takes in the result of the pass (None if it had no canvas rows of this request)."""
        if count := self.next_context:
            self._entered, self.cached = self._entered + 1, self.cached + count
        if result is None:
            self._choose_phase()
            return []
        return self._denoise(self._canvas, result)

    def compute_again(self) -> None:
        """Starts over with an empty cache; what was emitted stays. Only between canvases."""
        assert self.between_canvases and self.phase is not Phase.FINISHED
        self._entered = self.cached = 0
        self.statistics.preemptions += 1
        self._choose_phase()

    def end(self, reason: FinishReason, error: str | None = None) -> End:
        """Finishes the request from outside."""
        self.phase = Phase.FINISHED
        return End(reason, error)

    def _choose_phase(self) -> None:
        alone = len(self._pieces) - self._entered - self._fuse
        self.phase = Phase.PREFILL if alone > 0 else Phase.DENOISE

    def _new_canvas(self, index: int) -> _Canvas:
        start = self.context_length
        length = min(self._limits.canvas_length, self._limits.max_context - start)
        ids = self._noise(Purpose.INITIAL_CANVAS, index, 0, length)
        self.statistics.accepted.append([])
        stopping = sampler.Stopping(self.parameters.stability_threshold, self.parameters.confidence_threshold)
        return _Canvas(index, start, ids, stopping)

    def _noise(self, purpose: Purpose, canvas: int, step: int, length: int) -> Tensor:
        return randomness.tokens(self.parameters.seed, canvas, step, purpose, length, self._vocab_size)

    def _canvas_rows(self, slot: int) -> CanvasRows:
        canvas, chosen, steps = self._canvas, self.parameters, self.parameters.max_denoising_steps
        scale = chosen.temperature or 1.0
        temperature = sampler.schedule_temperature(steps - canvas.step + 1, steps, chosen.t_min * scale, chosen.t_max * scale)
        uniform = randomness.uniforms(chosen.seed, canvas.index, canvas.step, Purpose.SAMPLE, len(canvas.ids))
        return CanvasRows(slot, canvas.start, canvas.ids, canvas.soft_embeddings, temperature, uniform)

    def _denoise(self, canvas: _Canvas, result: CanvasResult) -> list[Event]:
        for name in ("entropy", "best_logprob", "soft_embeddings"):
            if not bool(getattr(result, name).isfinite().all()):
                where = f"canvas {canvas.index + 1}, step {canvas.step}"
                return [self.end("error", f"{name} is not finite in {where}; the engine or its weights are damaged")]
        best, entropy = result.best_ids.cpu(), result.entropy.cpu()
        accepted = sampler.accept(entropy, self.parameters.entropy_bound)
        self.statistics.accepted[-1].append(int(accepted.sum()))
        events: list[Event] = []
        if self.parameters.drafts:
            events.append(Draft(canvas.index, canvas.step, best.tolist(), accepted, entropy))
        stopped = canvas.stopping.update(best, entropy)
        if stopped or canvas.step == self.parameters.max_denoising_steps:
            return events + self._finish_canvas(canvas, best, result.best_logprob.tolist(), stopped)
        chosen = best if self.parameters.temperature == 0 else result.sampled_ids.cpu()
        canvas.ids = torch.where(accepted, chosen, self._noise(Purpose.RENOISE, canvas.index, canvas.step, len(best)))
        canvas.soft_embeddings = result.soft_embeddings
        canvas.step += 1
        return events

    def _finish_canvas(self, canvas: _Canvas, best: Tensor, logprobs: list[float], converged: bool) -> list[Event]:
        tokens, ended = sampler.before_end(best.tolist(), self.parameters.end_token_ids)
        self.statistics.steps.append(canvas.step)
        self.statistics.tokens.append(sum(token != self._pad_token_id for token in tokens) + ended)
        limit = self.parameters.max_new_tokens
        if limit is not None:
            left = limit - self.statistics.emitted
            ended = ended and len(tokens) < left
            tokens = tokens[:left]
        full = canvas.start + len(best) >= self._limits.max_context
        over = ended or full or self.statistics.emitted + len(tokens) == limit
        text = ""
        if self._text is not None:
            text = self._text.add(tokens, last=over)
            if self._text.stopped:
                tokens = tokens[: self._text.tokens_before_stop(tokens)]
                ended = over = True
        self.statistics.emitted += len(tokens)
        committed = Committed(canvas.index, tokens, text, logprobs[: len(tokens)], canvas.step, converged)
        if over:
            return [committed, self.end("stop" if ended else "length")]
        self._pieces.append(best)
        self.context_length += len(best)
        self._canvas = self._new_canvas(canvas.index + 1)
        self._choose_phase()
        return [committed]
