"""Lowerings of the experts: forms of one sum that suit a compiler without a grouped matmul."""

from __future__ import annotations

from dataclasses import dataclass

from dgemma_trt.build.layers import Layers, Node
from dgemma_trt.build.matmuls import Matmuls


@dataclass(frozen=True)
class Routing:
    """weights: float32 [rows, k]; chosen: int32 [rows, k], all different in a row."""

    weights: Node
    chosen: Node


def dense_experts(layers: Layers, matmuls: Matmuls, x: Node, routing: Routing, name: str, count: int) -> Node:
    """Every expert on every row x [rows, hidden]; no control flow, `count` / k times the arithmetic.

    What is not chosen is selected away, not multiplied by zero: an expert's overflow on a row that did not choose it stays out.
    """
    rows = layers.unsqueeze(x, [0])
    hidden = layers.gelu_gate(matmuls.linear(rows, f"{name}.gate_proj"), matmuls.linear(rows, f"{name}.up_proj"))
    out = layers.cast(matmuls.linear(hidden, f"{name}.down_proj"), "float32")
    with layers.scope(name):
        one_hot = layers.one_hot(routing.chosen, count)
        weights = layers.elementwise("PROD", one_hot, layers.unsqueeze(routing.weights, [2]))
        weights = layers.reduce("SUM", weights, 1, keep=False)
        chosen = layers.elementwise("GREATER", layers.reduce("SUM", one_hot, 1, keep=False), 0.5)
        weights, chosen = (layers.unsqueeze(layers.transpose(each, (1, 0)), [2]) for each in (weights, chosen))
        weighted = layers.select(chosen, layers.elementwise("PROD", out, weights), 0.0)
        return layers.rounded(layers.reduce("SUM", weighted, 0, keep=False))
