"""A scripted session: the network replaced by a function of exactly what a network may use.

That is the tokens in a slot's cache, the canvas, its soft embeddings. It refuses rows that do not continue the cache, so that
stale or misplaced context shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dgemma_trt.config import GenerationConfig
from dgemma_trt.runtime.diffusion import Request
from dgemma_trt.runtime.events import Committed, Draft, End, Event
from dgemma_trt.runtime.parameters import GenerationParameters
from dgemma_trt.runtime.scheduler import Scheduler
from dgemma_trt.runtime.session import CanvasResult, CanvasRows, ContextRows, Limits
from dgemma_trt.runtime.vocabulary import read_vocabulary

T, V, HIDDEN, PAD = 8, 37, 5, 0
CONFIG = GenerationConfig(end_token_ids=(1, 5), max_denoising_steps=12)
LIMITS = Limits(max_batch=4, max_context=96, prefill_chunk=6, canvas_length=T)
TABLE = torch.from_numpy(np.random.default_rng(1).normal(size=(V, HIDDEN))).float()
MIXING = torch.from_numpy(np.random.default_rng(2).normal(size=(HIDDEN, V)) * 0.05).float()


def scripted_logits(context: Sequence[int], ids: Tensor, soft: Tensor | None) -> Tensor:
    """Float32 [T, V]: the more of a target, itself a function of the context, the canvas holds, the surer of the rest."""
    hidden_target = _generator(context).integers(0, V, len(ids))
    found = ids.numpy() == hidden_target
    logits = _generator([*context, -1, *ids.tolist()]).normal(size=(len(ids), V)) * 1.5
    logits[np.arange(len(ids)), hidden_target] += 2 + 6 * found.mean() + 4 * found
    return torch.from_numpy(logits).float() + (0 if soft is None else soft @ MIXING)


def _generator(words: Sequence[int]) -> np.random.Generator:
    return np.random.default_rng(list(hashlib.sha256(np.array(words, dtype=np.int64).tobytes()).digest()))


class ScriptedSession:
    """A session whose network is `scripted_logits`, or whatever `answer` makes of a canvas; keeps a record of its passes."""

    def __init__(self, limits: Limits = LIMITS, answer: Callable[[CanvasRows], CanvasResult] | None = None) -> None:
        self.limits = limits
        self.caches: dict[int, list[int]] = {}
        self.passes: list[tuple[list[ContextRows], list[CanvasRows]]] = []
        self._answer = answer or self._denoise

    def run(self, context: Sequence[ContextRows], canvases: Sequence[CanvasRows]) -> list[CanvasResult]:
        self.passes.append((list(context), list(canvases)))
        for group in (context, canvases):
            slots = [rows.slot for rows in group]
            assert len(slots) == len(set(slots)) and set(slots) <= set(range(self.limits.max_batch))
        for chunk in context:
            self._enter(chunk)
            self.caches.setdefault(chunk.slot, []).extend(chunk.ids.tolist())
        for rows in canvases:
            self._enter(rows)
        return [self._answer(rows) for rows in canvases]

    def reset(self, slot: int) -> None:
        self.caches.pop(slot, None)

    def _enter(self, rows: ContextRows | CanvasRows) -> None:
        assert rows.start == len(self.caches.get(rows.slot, [])), "rows must continue their slot's cache"
        assert rows.ids.dtype == torch.int64 and len(rows.ids) >= 1
        assert rows.start + len(rows.ids) <= self.limits.max_context

    def _denoise(self, rows: CanvasRows) -> CanvasResult:
        z = scripted_logits(self.caches[rows.slot], rows.ids, rows.soft_embeddings) / rows.temperature
        read = read_vocabulary(z, rows.uniform)
        soft = (read.probabilities @ TABLE) / read.total[:, None]
        return CanvasResult(read.best_ids, read.sampled_ids, read.entropy, read.best_logprob, soft)


def answering(*canvases: Sequence[int], prompt_length: int, entropy: float = 0.0) -> Callable[[CanvasRows], CanvasResult]:
    """Gives canvas i of a prompt this long the best tokens `canvases[i]`, the last from then on; samples token 36."""

    def answer(rows: CanvasRows) -> CanvasResult:
        best = torch.tensor(canvases[min((rows.start - prompt_length) // T, len(canvases) - 1)])[: len(rows.ids)]
        zeros = torch.zeros(len(best))
        soft = torch.full((len(best), HIDDEN), float(rows.start))
        return CanvasResult(best, torch.full_like(best, V - 1), zeros + entropy, zeros, soft)

    return answer


def decode(ids: Sequence[int]) -> str:
    """One character a token: a digit, a letter, and = for the last."""
    return "".join("0123456789abcdefghijklmnopqrstuvwxyz="[token] for token in ids)


def request(prompt: Sequence[int] = (2, 9, 4), limits: Limits = LIMITS, *, fuse: bool = True, **parameters: Any) -> Request:
    return Request(list(prompt), GenerationParameters.of(CONFIG, **parameters), limits, V, PAD, decode, fuse)


def run(session: ScriptedSession, requests: Sequence[Request], **options: Any) -> list[list[Event]]:
    """The events of each, all submitted before the first pass. options: of the scheduler."""
    scheduler = Scheduler(session, **options)
    jobs = [scheduler.submit(each) for each in requests]
    while scheduler.step():
        pass
    assert scheduler.running == scheduler.waiting == scheduler.cache_used == 0 and session.caches == {}
    return [list(job.events) for job in jobs]


def answer_of(events: Sequence[Event]) -> tuple[list[int], str, list[Committed]]:
    """(token ids, finish reason, committed canvases); the end comes last and once."""
    committed = [event for event in events if isinstance(event, Committed)]
    ends = [event for event in events if isinstance(event, End)]
    assert ends == [events[-1]]
    return [token for canvas in committed for token in canvas.token_ids], ends[0].finish_reason, committed


def plain(events: Sequence[Event]) -> list[Any]:
    """Events in a form that compares bit for bit."""
    return [
        (e.canvas, e.step, e.token_ids, e.accepted.tolist(), e.entropy.tolist(), e.mean_entropy) if isinstance(e, Draft) else e
        for e in events
    ]
