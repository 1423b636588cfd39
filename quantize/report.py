"""What a quantized checkpoint holds, by kind of layer, in counts and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.table import Table

from dgemma_trt.checkpoint import Checkpoint
from dgemma_trt.quantize.calibration import Coverage, InputRange
from dgemma_trt.weights import Precision, linear_shapes, tensor_shapes

KINDS = ("experts", "dense MLP", "attention", "router", "self-conditioning", "embeddings", "norms and scalars")


@dataclass
class KindReport:
    """One kind of layer in one precision: how many weight tensors (an expert's each count), weights, bytes with scales."""

    kind: str
    precision: Precision
    tensors: int = 0
    weights: int = 0
    bytes: int = 0

    @property
    def bits_per_weight(self) -> float:
        """Stored bits, scales included, for each weight."""
        return 8 * self.bytes / self.weights


@dataclass(frozen=True)
class QuantizationReport:
    """What was quantized and what was not.

    input_ranges: of each matmul that calibration saw. coverage: None for a recipe that needs no calibration. notes: lines a
    user should read.
    """

    quant: str
    kinds: list[KindReport]
    source_bytes: int
    input_ranges: dict[str, InputRange] = field(default_factory=dict)
    coverage: Coverage | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of the language model's tensors in the result."""
        return sum(kind.bytes for kind in self.kinds)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits, scales included, for each weight of the language model."""
        return 8 * self.bytes / sum(kind.weights for kind in self.kinds)

    def table(self) -> Table:
        """The report as a table for the terminal."""
        table = Table(title=f"{self.quant}: {_size(self.source_bytes)} → {_size(self.bytes)}", title_justify="left")
        table.add_column("layers")
        table.add_column("stored as")
        for column in ("tensors", "weights", "bytes", "bits/weight"):
            table.add_column(column, justify="right")
        for row in self.kinds:
            table.add_row(
                row.kind,
                row.precision,
                f"{row.tensors:,}",
                f"{row.weights:,}",
                f"{row.bytes:,}",
                f"{row.bits_per_weight:.2f}",
                style=None if row.precision is Precision.BF16 else "bold",
            )
        table.add_section()
        tensors, weights = (sum(getattr(row, name) for row in self.kinds) for name in ("tensors", "weights"))
        table.add_row("all", "", f"{tensors:,}", f"{weights:,}", f"{self.bytes:,}", f"{self.bits_per_weight:.2f}")
        if self.notes:
            table.caption, table.caption_justify = "\n".join(self.notes), "left"
        return table


def report_on(
    quant: str, source: Checkpoint, written: Checkpoint, ranges: dict[str, InputRange], coverage: Coverage | None
) -> QuantizationReport:
    """Counts the tensors of a written checkpoint, quantized from `source`."""
    return QuantizationReport(
        quant=quant,
        kinds=count_kinds(written),
        source_bytes=sum(row.bytes for row in count_kinds(source)),
        input_ranges=ranges,
        coverage=coverage,
        notes=[*source.notes, *_calibration_notes(ranges, coverage)],
    )


def count_kinds(checkpoint: Checkpoint) -> list[KindReport]:
    """One row for each kind of layer and precision, in the order of `KINDS`."""
    rows: dict[tuple[str, Precision], KindReport] = {}
    for name, precision, tensors, weights, size in _counted(checkpoint):
        kind = _kind(name)
        row = rows.setdefault((kind, precision), KindReport(kind, precision))
        row.tensors += tensors
        row.weights += weights
        row.bytes += size
    return sorted(rows.values(), key=lambda row: KINDS.index(row.kind))


def _counted(checkpoint: Checkpoint) -> Iterator[tuple[str, Precision, int, int, int]]:
    """Name, precision, weight tensors, weights and bytes of each entry of the model."""
    for name, shape in linear_shapes(checkpoint.config):
        linear = checkpoint.linear(name)
        size = sum(tensor.numel() * tensor.element_size() for tensor in linear.tensors().values())
        yield name, linear.precision, shape[0] if len(shape) == 3 else 1, math.prod(shape), size
    for name, _ in tensor_shapes(checkpoint.config):
        tensor = checkpoint.tensor(name)
        yield name, Precision.BF16, 1, tensor.numel(), tensor.numel() * tensor.element_size()


def _kind(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "embed_tokens":
        return "embeddings"
    if parts[0] == "self_conditioning":
        return "norms and scalars" if parts[1] == "pre_norm" else "self-conditioning"
    if parts[-1].endswith(("_norm", "norm")) or "layernorm" in parts[-1] or "layer_scalar" in parts:
        return "norms and scalars"
    return {"self_attn": "attention", "mlp": "dense MLP", "experts": "experts", "router": "router"}[parts[2]]


def _calibration_notes(ranges: dict[str, InputRange], coverage: Coverage | None) -> list[str]:
    if coverage is None:
        return ["no calibration: the weights alone determine the scales"]
    notes = [
        f"calibrated on {coverage.prompts} prompts, {coverage.commits} committed canvases, {coverage.denoising_steps} "
        "denoising steps"
    ]
    name, widest = max(ranges.items(), key=lambda item: _ratio(item[1]))
    notes.append(
        f"the two modes' input ranges differ most in {name}: {widest.encoder:.3g} in the encoder, {widest.decoder:.3g} in the "
        "decoder; scales cover both"
    )
    unseen = coverage.unseen_experts
    if unseen:
        total = sum(map(len, unseen.values()))
        layer, experts = next(iter(unseen.items()))
        notes.append(
            f"{total} experts saw no token and take their layer's input scale ({layer}: {', '.join(map(str, experts[:8]))}"
            f"{' …' if len(experts) > 8 or len(unseen) > 1 else ''})"
        )
    return notes


def _ratio(observed: InputRange) -> float:
    low, high = sorted((observed.encoder, observed.decoder))
    return high / low if low > 0 else math.inf


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
