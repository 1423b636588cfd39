"""Counter-based random numbers: every draw is a function of (seed, canvas, step, position, purpose) and of nothing else.

So a request's draws do not depend on its neighbours, its slot or the order of arrival. The generator is numpy's Philox4x64,
whose stream numpy promises to keep: the seed is its key, the other words its counter, and position i gets the i-th output.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from numpy.random import Philox
from torch import Tensor

from dgemma_trt.errors import UserError


class Purpose(IntEnum):
    """What a draw is for."""

    INITIAL_CANVAS = 1
    SAMPLE = 2
    RENOISE = 3


def check_seed(seed: int) -> None:
    """Raises UserError unless 0 <= seed < 2**64."""
    if not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise UserError(f"seed is {seed!r}; it must be a whole number from 0 to 2**64 - 1")


def uniforms(seed: int, canvas: int, step: int, purpose: Purpose, count: int) -> Tensor:
    """Float32 [count] in [0, 1), multiples of 2**-24, for positions 0 … count - 1 of a canvas."""
    bits = _bits(seed, canvas, step, purpose, count) >> np.uint64(40)
    return torch.from_numpy(bits.astype(np.float32) * np.float32(2.0**-24))


def tokens(seed: int, canvas: int, step: int, purpose: Purpose, count: int, vocab_size: int) -> Tensor:
    """Int64 [count], uniform over the vocabulary, but for a bias of at most vocab_size / 2**64."""
    drawn = _bits(seed, canvas, step, purpose, count) % np.uint64(vocab_size)
    return torch.from_numpy(drawn.astype(np.int64))


def _bits(seed: int, canvas: int, step: int, purpose: Purpose, count: int) -> np.ndarray:
    # The lowest counter word counts the outputs themselves, four to a block.
    return Philox(key=seed, counter=[0, purpose, step, canvas]).random_raw(count)
