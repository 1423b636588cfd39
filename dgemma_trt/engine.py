"""The Python interface: open an engine directory or a checkpoint folder, generate text, compare logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma_trt.checkpoint import Checkpoint
from dgemma_trt.config import WindowRule
from dgemma_trt.engine_directory import LIMITS, EngineDirectory, is_engine_directory
from dgemma_trt.errors import UserError
from dgemma_trt.runtime.diffusion import Request
from dgemma_trt.runtime.events import Committed, End, Event, FinishReason, Statistics
from dgemma_trt.runtime.host import HostSession
from dgemma_trt.runtime.parameters import GenerationParameters
from dgemma_trt.runtime.scheduler import Job, Scheduler
from dgemma_trt.runtime.session import CanvasRows, ContextRows, Limits
from dgemma_trt.sources import find_checkpoint
from dgemma_trt.text import Message, Text

Prompt = str | Sequence[Message] | Sequence[int]
"""A question, a conversation (dicts with role and content), or token ids."""


@dataclass(frozen=True)
class Generation:
    """An answer. token_ids end before the end token; `canvases` holds what was committed, one entry a canvas.

    With a stop string, text ends before it and token_ids with the token that completed it. `error` explains the finish reason
    of that name.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    canvases: list[Committed]
    statistics: Statistics
    error: str | None = None


class Engine:
    """A model ready to answer. Make one with `Engine.open`."""

    def __init__(self, source: Checkpoint | EngineDirectory, limits: Limits, device: str, dtype: torch.dtype) -> None:
        self.source, self.device = source, device
        rule: WindowRule = source.manifest.window_rule if isinstance(source, EngineDirectory) else "reference"
        self.session = HostSession(source, limits, dtype=dtype, device=device, window_rule=rule)
        self.scheduler = Scheduler(self.session)
        self.text = Text(source.folder)

    @classmethod
    def open(cls, path: str | Path, device: str = "auto", dtype: torch.dtype = torch.float32) -> Engine:
        """Opens an engine directory, a checkpoint folder, a Hugging Face id, or `nano`.

        device: `cpu`, `cuda`, or `auto`, which takes a GPU if there is one. The network runs on the host session, with torch;
        dtype is what that rounds hidden states to.

        Raises:
            UserError: nothing usable at `path`, or no such device.
        """
        if dtype not in (torch.float32, torch.bfloat16):
            raise UserError(f"dtype is {dtype!r}; choose torch.float32 or torch.bfloat16")
        if device not in ("auto", "cpu", "cuda"):
            raise UserError(f"device is {device!r}; choose auto, cpu or cuda")
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError("device is 'cuda', but torch finds no CUDA GPU here; choose cpu")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        folder = find_checkpoint(str(path))
        if is_engine_directory(folder):
            engine = EngineDirectory(folder)
            return cls(engine, Limits(**{name: engine.manifest.limits[name] for name in LIMITS}), device, dtype)
        checkpoint = Checkpoint(folder)
        return cls(checkpoint, default_limits(checkpoint), device, dtype)

    def request(self, prompt: Prompt, *, raw: bool = False, **parameters: Any) -> Request:
        """A request for `prompt`: token ids as they are, a conversation or question through the chat template.

        raw: a string is continued as it stands. parameters: those of `GenerationParameters`.

        Raises:
            UserError: an empty or too long prompt, or a parameter outside its range.
        """
        chosen = GenerationParameters.of(self.source.generation_config, **parameters)
        config = self.source.config
        ids = self._encode(prompt, raw)
        return Request(ids, chosen, self.session.limits, config.vocab_size, config.pad_token_id, self.text.decode)

    def generate(self, prompts: Prompt | Sequence[Prompt], *, raw: bool = False, **parameters: Any) -> list[Generation]:
        """Answers each prompt, exactly as it would be answered alone; `parameters` (the seed too) hold for each.

        Raises:
            UserError: see `request`.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            prompts = [prompts]
        single = len(prompts) > 0 and isinstance(prompts[0], int | dict)
        each: Sequence[Any] = [prompts] if single else prompts
        requests = [self.request(prompt, raw=raw, **{"drafts": False, **parameters}) for prompt in each]
        jobs: list[Job] = []
        try:
            jobs.extend(map(self.scheduler.submit, requests))
            return [_generation(job, list(self.scheduler.stream(job))) for job in jobs]
        finally:
            for job in jobs:
                self.scheduler.cancel(job)

    def stream(self, prompt: Prompt, *, raw: bool = False, **parameters: Any) -> Iterator[Event]:
        """Answers one prompt, yielding drafts, committed canvases and the end as they come.

        It is queued when the first event is asked for, and waits its turn if every slot is taken. Closing the iterator
        cancels it.

        Raises:
            UserError: see `request`.
        """
        return self._run(self.request(prompt, raw=raw, **parameters))

    def _run(self, request: Request) -> Iterator[Event]:
        yield from self.scheduler.stream(self.scheduler.submit(request))

    def logits(
        self, context_ids: Tensor | Sequence[Sequence[int]], canvas_ids: Tensor, soft_embeddings: Tensor | None = None
    ) -> Tensor:
        """Softcapped logits, float32 [B, T, V], of one denoising step, for comparison with references.

        context_ids: int [B, n], or B lists of any length. canvas_ids: int [B, T]. soft_embeddings: [B, T, hidden], the
        probabilities of the previous step times the scaled embedding table; None at the first step.
        """
        contexts = [torch.as_tensor(context, dtype=torch.int64) for context in context_ids]
        self._check_logits_inputs(contexts, canvas_ids, soft_embeddings)
        slot = self.session.limits.max_batch  # one that the scheduler does not use
        found = []
        try:
            for index, (context, canvas) in enumerate(zip(contexts, canvas_ids, strict=True)):
                soft = None if soft_embeddings is None else soft_embeddings[index]
                rows = CanvasRows(slot, len(context), canvas, soft, temperature=1.0, uniform=torch.zeros(len(canvas)))
                self.session.reset(slot)
                chunk = self.session.limits.prefill_chunk
                chunks = [ContextRows(slot, start, context[start : start + chunk]) for start in range(0, len(context), chunk)]
                for piece in chunks[:-1]:
                    self.session.logits([piece], [])
                found.extend(self.session.logits(chunks[-1:], [rows]))
        finally:
            self.session.reset(slot)
        return torch.stack(found)

    def _check_logits_inputs(self, contexts: list[Tensor], canvas_ids: Tensor, soft_embeddings: Tensor | None) -> None:
        config = self.source.config
        if canvas_ids.ndim != 2 or len(canvas_ids) != len(contexts) or not canvas_ids.numel():
            raise UserError(
                f"canvas_ids has shape {list(canvas_ids.shape)}; expected [B, T], one row for each of {len(contexts)} contexts"
            )
        for ids in (*contexts, canvas_ids):
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
                raise UserError(f"a token id lies outside 0 … {config.vocab_size - 1}")
        expected = (*canvas_ids.shape, config.hidden_size)
        if soft_embeddings is not None and tuple(soft_embeddings.shape) != expected:
            raise UserError(f"soft_embeddings has shape {list(soft_embeddings.shape)}; expected {list(expected)}")

    def _encode(self, prompt: Prompt, raw: bool) -> list[int]:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UserError("the prompt is empty; give at least one word")
            return self.text.raw(prompt) if raw else self.text.chat([{"role": "user", "content": prompt}])
        if isinstance(prompt, Sequence) and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            return [*prompt]
        if isinstance(prompt, Sequence) and all(isinstance(message, dict) for message in prompt):
            return self.text.chat(prompt)  # type: ignore[arg-type]
        raise UserError(
            f"a prompt is a string, a list of messages (dicts with role and content) or a list of token ids, not {prompt!r:.80}"
        )


def _generation(job: Job, events: list[Event]) -> Generation:
    canvases = [event for event in events if isinstance(event, Committed)]
    end = events[-1]
    assert isinstance(end, End)
    return Generation(
        text="".join(canvas.text for canvas in canvases),
        token_ids=[token for canvas in canvases for token in canvas.token_ids],
        finish_reason=end.finish_reason,
        canvases=canvases,
        statistics=job.request.statistics,
        error=end.error,
    )


def default_limits(checkpoint: Checkpoint) -> Limits:
    """Limits for a checkpoint that was not built: 8 requests, 8,192 positions, prompts in chunks of 512."""
    config = checkpoint.config
    return Limits(
        max_batch=8,
        max_context=min(8192, config.max_positions),
        prefill_chunk=512,
        canvas_length=config.canvas_length,
    )
