"""The decisions of the diffusion loop: temperature schedule, acceptance within the entropy bound, stopping.

Pure functions on one canvas, each equal to its counterpart in transformers' generation_diffusion_gemma.py.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor


def schedule_temperature(remaining: int, steps: int, t_min: float, t_max: float) -> float:
    """t_min + (t_max - t_min) * n / N with n steps remaining of N, in float32 as the reference computes it."""
    return float(t_min + (t_max - t_min) * (torch.tensor(remaining, dtype=torch.int32) / steps))


def accept(entropy: Tensor, entropy_bound: float) -> Tensor:
    """Bool [T]: positions in ascending (entropy, position) while the entropy accepted before them is within the bound.

    entropy: float32 [T] in nats. The most certain position is always accepted.
    """
    ascending, order = entropy.sort(stable=True)
    within = ascending.cumsum(0) - ascending <= entropy_bound
    return torch.zeros_like(within).scatter(0, order, within)


class Stopping:
    """Stops a canvas when its argmax is stable and its mean entropy low; one for each canvas.

    Stable: equal to the argmax of each of the last `stability_threshold` steps (with 0, always). Confident: mean entropy, in
    nats, strictly below `confidence_threshold`.
    """

    def __init__(self, stability_threshold: int, confidence_threshold: float) -> None:
        self._confidence_threshold = confidence_threshold
        self._history: list[Tensor | None] = [None] * stability_threshold

    def update(self, best_ids: Tensor, entropy: Tensor) -> bool:
        """Takes in one step's argmax (int64 [T]) and entropy (float32 [T]); True when denoising may stop."""
        stable = all(past is not None and torch.equal(past, best_ids) for past in self._history)
        if self._history:
            self._history = [*self._history[1:], best_ids]
        return stable and bool(entropy.mean() < self._confidence_threshold)


def before_end(token_ids: list[int], end_token_ids: Collection[int]) -> tuple[list[int], bool]:
    """The tokens before the first end token, and whether there was one."""
    for index, token in enumerate(token_ids):
        if token in end_token_ids:
            return token_ids[:index], True
    return token_ids, False
