"""Reads tokens off the logits of a canvas: argmax, a draw, entropy, log-probability."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 512
"""Tokens in a block of the two-level draw."""


@dataclass(frozen=True)
class Reading:
    """What `read_vocabulary` finds in z [T, V].

    best_ids, sampled_ids: int64 [T]. entropy (nats), best_logprob: float32 [T]. probabilities: float32 [T, V], exp(z - max),
    not normalised. total: float32 [T], their sum.
    """

    best_ids: Tensor
    sampled_ids: Tensor
    entropy: Tensor
    best_logprob: Tensor
    probabilities: Tensor
    total: Tensor


def read_vocabulary(z: Tensor, uniform: Tensor) -> Reading:
    """Reads off processed logits z (float32 [T, V], divided by the temperature), drawing with `uniform` (float32 [T]).

    With p = exp(z - max) and S their sum, the draw is the first token at which the running sum of p exceeds uniform * S: first
    the block of 512 tokens, then the token inside it; if rounding finds none there, the block's last with p > 0. Entropy is
    log S - sum(p (z - max)) / S, at least 0. A row with a NaN, +inf or nothing but -inf gives NaN, never an exception.

    Sums over a block are float32, which torch adds pairwise (relative error about 1e-7), running sums float64: a plain float32
    running sum over 262,144 tokens picks another token in 13 % of draws from flat rows.
    """
    vocab = z.shape[-1]
    peak, best = z.max(dim=-1)
    # At -200 exp is 0 already, and p * (z - max) is 0, where -inf would make it NaN.
    shifted = (z - peak[:, None]).clamp_(min=-200)
    padded = z.new_zeros(len(z), vocab + -vocab % BLOCK)
    p = padded[:, :vocab]
    torch.exp(shifted, out=p)
    sampled, total = _sample(padded.unflatten(-1, (-1, BLOCK)), uniform)
    log_total = total.log()
    # Never below 0: S holds the maximum's 1, and z - max is at most 0.
    entropy = log_total - shifted.mul_(p).sum(dim=-1) / total
    return Reading(
        best_ids=best,
        sampled_ids=sampled,
        entropy=entropy.float(),
        best_logprob=-log_total.float(),
        probabilities=p,
        total=total.float(),
    )


def _sample(blocks: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """(token drawn from each row, int64 [T]; sum of each row, float64 [T]) of blocks, float32 [T, n, 512]."""
    rows = torch.arange(len(blocks), device=blocks.device)
    sums = blocks.sum(dim=-1).double()
    running = sums.cumsum(dim=-1)
    total = running[:, -1]
    target = uniform.double() * total
    block = _first_beyond(running, target, sums)
    inside = blocks[rows, block].double()
    before = running[rows, block] - sums[rows, block]
    return block * BLOCK + _first_beyond(inside.cumsum(dim=-1), target - before, inside), total


def _first_beyond(running: Tensor, target: Tensor, p: Tensor) -> Tensor:
    """Int64 [T]: the first index at which `running`, the running sum of p [T, n], exceeds target [T]; else the last p > 0."""
    last = torch.where(p > 0, torch.arange(p.shape[-1], device=p.device), 0).amax(dim=-1)
    return torch.minimum((running <= target[:, None]).sum(dim=-1), last)
