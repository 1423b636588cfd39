"""Puts this project's random draws into the reference's diffusion loop, so that whole runs can be compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dgemma_trt.runtime import randomness
from dgemma_trt.runtime.randomness import Purpose
from dgemma_trt.runtime.vocabulary import read_vocabulary


class OurDraws:
    """Stands for torch.randint and torch.multinomial in the reference's loop; each row of a batch gets the same draws."""

    def __init__(self, seed: int, canvas_length: int) -> None:
        self._length = canvas_length
        self._seed, self._canvas, self._step, self._sampled = seed, -1, 0, False

    def randint(self, low: int, high: int, size: tuple[int, int], **_: Any) -> Tensor:
        purpose = Purpose.RENOISE if self._sampled else Purpose.INITIAL_CANVAS
        if not self._sampled:
            self._canvas, self._step = self._canvas + 1, 0
        self._sampled = False
        drawn = randomness.tokens(self._seed, self._canvas, self._step, purpose, size[1], high)
        return drawn.expand(size)

    def multinomial(self, probabilities: Tensor, num_samples: int) -> Tensor:
        self._step, self._sampled = self._step + 1, True
        uniform = randomness.uniforms(self._seed, self._canvas, self._step, Purpose.SAMPLE, self._length)
        return read_vocabulary(probabilities.log(), uniform.repeat(len(probabilities) // self._length)).sampled_ids[:, None]


def patch_draws(monkeypatch: pytest.MonkeyPatch, seed: int, canvas_length: int) -> None:
    """Until the test ends, torch.randint and torch.multinomial give what a request with `seed` draws."""
    draws = OurDraws(seed, canvas_length)
    monkeypatch.setattr(torch, "randint", draws.randint)
    monkeypatch.setattr(torch, "multinomial", draws.multinomial)
    # Means nothing on a CPU, and its first call imports torch's compiler, for seconds.
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
