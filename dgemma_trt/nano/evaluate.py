"""Examines an engine or a checkpoint on the nano's fixed evaluation set.

python -m dgemma_trt.nano.evaluate --engine PATH [--dtype bfloat16]
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice

import click
import torch

from dgemma_trt.engine import Engine
from dgemma_trt.nano.tasks import Example, evaluation_set


@dataclass
class Score:
    """Results on one kind of task: right answers, denoising steps of every canvas, tokens per forward of every answer."""

    right: list[bool] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    tokens_per_forward: list[float] = field(default_factory=list)
    wrong: list[tuple[Example, str]] = field(default_factory=list)

    def row(self) -> str:
        """The figures in one line."""
        share = sum(self.right) / len(self.right)
        return (
            f"{sum(self.right):4d} of {len(self.right):3d} right ({100 * share:5.1f} %), "
            f"{sum(self.steps) / len(self.steps):5.2f} steps a canvas, "
            f"{sum(self.tokens_per_forward) / len(self.tokens_per_forward):5.2f} tokens per forward"
        )


def examine(engine: Engine, examples: list[Example], seed: int = 0) -> dict[str, Score]:
    """Scores by kind of task; `all` over everything."""
    scores: dict[str, Score] = defaultdict(Score)
    batch = engine.session.limits.max_batch
    remaining = iter(examples)
    while group := list(islice(remaining, batch)):
        answers = engine.generate([example.question for example in group], max_new_tokens=160, seed=seed)
        for example, answer in zip(group, answers, strict=True):
            for kind in (example.kind, "all"):
                score = scores[kind]
                score.right.append(example.is_right(answer.text))
                score.steps.extend(answer.statistics.steps)
                score.tokens_per_forward.append(answer.statistics.tokens_per_forward)
                if not score.right[-1]:
                    score.wrong.append((example, answer.text))
    return dict(scores)


@click.command()
@click.option("--engine", "path", default="nano", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(path: str, dtype: str, seed: int) -> None:
    """Print how many questions of the fixed set PATH answers, and in how many denoising steps."""
    engine = Engine.open(path, "cpu", getattr(torch, dtype))
    scores = examine(engine, evaluation_set(), seed)
    for kind in ("fact", "sum", "word", "long", "all"):
        held_out = " (held out)" if kind in ("sum", "word") else ""
        click.echo(f"{kind + held_out:16s} {scores[kind].row()}")
    for example, text in scores["all"].wrong:
        click.echo(f"  {example.question!r}: {text!r}, expected {example.answer!r}")


if __name__ == "__main__":
    main()
