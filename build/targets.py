"""The GPUs that TensorRT for RTX compiles for, and what each can compute."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dgemma_trt.errors import UserError
from dgemma_trt.weights import Precision


@dataclass(frozen=True)
class Target:
    """A compute capability, e.g. sm120; `name.upper()` is its name in `trt.ComputeCapability`."""

    name: str
    gpus: str

    @property
    def capability(self) -> int:
        """89 for sm89."""
        return int(self.name.removeprefix("sm"))

    def runs(self, precision: Precision) -> bool:
        """Whether the GPU has the matmuls of `precision`."""
        return self.capability >= _SINCE[precision]


TARGETS = {
    target.name: target
    for target in (
        Target("sm80", "A100, A30"),
        Target("sm86", "GeForce RTX 30, RTX A6000"),
        Target("sm89", "GeForce RTX 40, RTX 6000 Ada, L40"),
        Target("sm120", "GeForce RTX 50, RTX PRO Blackwell"),
        Target("sm121", "DGX Spark"),
    )
}

_SINCE = {
    Precision.BF16: 80,
    Precision.FP8: 89,
    Precision.FP8_STATIC: 89,
    Precision.NVFP4: 120,
    # The weight is unpacked first, but the compiler knows no FP4 at all on older GPUs.
    Precision.NVFP4_WEIGHTS: 120,
}


_RECIPES = (Precision.BF16, Precision.FP8, Precision.NVFP4)
"""What `dgemma-trt quantize` makes, and what it starts from."""


def check(precisions: Collection[Precision], names: Iterable[str]) -> list[Target]:
    """The targets called `names`, each once, if every one of them can compute all `precisions`.

    Raises:
        UserError: an unknown target, or a precision it cannot compute; says what would fit.
    """
    if not (names := list(names)):
        raise UserError(f"no target is named; known are {', '.join(TARGETS)}")
    chosen = []
    for name in dict.fromkeys(names):
        target = TARGETS.get(name)
        if target is None:
            known = ", ".join(f"{each.name} ({each.gpus})" for each in TARGETS.values())
            raise UserError(f"unknown target {name!r}; known are {known}")
        if missing := sorted(precision for precision in precisions if not target.runs(precision)):
            able = ", ".join(each.name for each in TARGETS.values() if all(map(each.runs, precisions)))
            usable = ", ".join(precision for precision in _RECIPES if target.runs(precision))
            raise UserError(
                f"{name} ({target.gpus}) cannot compute {', '.join(missing)}, which this checkpoint holds: build for {able}, "
                f"or quantize to what {name} can ({usable})"
            )
        chosen.append(target)
    return chosen
