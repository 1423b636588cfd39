"""Draws depend on (seed, canvas, step, position, purpose) and on nothing else, and are uniform."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dgemma_trt.errors import UserError
from dgemma_trt.runtime.randomness import Purpose, check_seed, tokens, uniforms

V = 262_144


def test_the_streams_are_those_that_earlier_versions_drew() -> None:
    """A seed written down with an answer must give it again: these numbers may not change."""
    assert tokens(7, 1, 2, Purpose.RENOISE, 6, V).tolist() == [79052, 13543, 15384, 100534, 10941, 119874]
    assert (uniforms(7, 1, 2, Purpose.SAMPLE, 4) * 2**24).tolist() == [3323820.0, 527059.0, 2589257.0, 3700403.0]


def test_a_position_gets_the_same_draw_whatever_the_length_of_its_canvas() -> None:
    long = tokens(3, 0, 5, Purpose.RENOISE, 256, V), uniforms(3, 0, 5, Purpose.SAMPLE, 256)
    for count in (1, 3, 4, 5, 255):
        assert torch.equal(tokens(3, 0, 5, Purpose.RENOISE, count, V), long[0][:count])
        assert torch.equal(uniforms(3, 0, 5, Purpose.SAMPLE, count), long[1][:count])


def test_draws_do_not_depend_on_what_was_drawn_before() -> None:
    keys = [(seed, canvas, step) for seed in (0, 9) for canvas in (0, 1) for step in (0, 1, 2)]
    forward = {key: tokens(*key, Purpose.RENOISE, 8, V) for key in keys}
    backward = {key: tokens(*key, Purpose.RENOISE, 8, V) for key in reversed(keys)}
    assert all(torch.equal(forward[key], backward[key]) for key in keys)


def test_every_seed_canvas_step_and_purpose_has_draws_of_its_own() -> None:
    keys = [
        (seed, canvas, step, purpose)
        for seed in (0, 1, 2**32, 2**63, 2**64 - 1)
        for canvas in (0, 1, 256, 1023)
        for step in (0, 1, 2, 48, 256)
        for purpose in Purpose
    ]
    assert len({tuple(tokens(*key, 8, V).tolist()) for key in keys}) == len(keys)


def test_uniforms_are_float32_in_the_half_open_interval() -> None:
    drawn = torch.cat([uniforms(1, canvas, 1, Purpose.SAMPLE, 100_000) for canvas in range(20)])
    assert drawn.dtype == torch.float32
    assert drawn.min() >= 0 and drawn.max() < 1
    assert torch.equal(drawn * 2**24, (drawn * 2**24).round())
    assert stats.kstest(drawn.numpy(), "uniform").pvalue > 0.01


def test_the_largest_and_smallest_bits_stay_inside_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = np.array([0, 2**64 - 1], dtype=np.uint64)
    monkeypatch.setattr("dgemma_trt.runtime.randomness._bits", lambda *_: extremes)
    assert uniforms(0, 0, 1, Purpose.SAMPLE, 2).tolist() == [0.0, 1 - 2**-24]


@pytest.mark.parametrize("vocab_size", [2, 199, 1000, V])
def test_tokens_are_uniform_over_the_vocabulary(vocab_size: int) -> None:
    drawn = torch.cat([tokens(5, canvas, 0, Purpose.INITIAL_CANVAS, 256, vocab_size) for canvas in range(400)])
    assert drawn.dtype == torch.int64
    assert drawn.min() >= 0 and drawn.max() < vocab_size
    bins = min(vocab_size, 512)
    found = np.bincount(drawn.numpy() % bins, minlength=bins)
    tokens_per_bin = np.bincount(np.arange(vocab_size) % bins, minlength=bins)
    assert stats.chisquare(found, tokens_per_bin * (len(drawn) / vocab_size)).pvalue > 0.01


def test_draws_of_neighbouring_steps_and_positions_are_unrelated() -> None:
    grid = torch.stack([uniforms(11, 0, step, Purpose.SAMPLE, 256) for step in range(1, 257)]).numpy()
    for first, second in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 4 / 256
    assert stats.chisquare(np.histogram2d(grid[1:].ravel(), grid[:-1].ravel(), bins=16)[0].ravel()).pvalue > 0.01


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "7", None])
def test_a_seed_that_is_no_64_bit_number_is_refused(seed: Any) -> None:
    with pytest.raises(UserError, match="seed is"):
        check_seed(seed)
