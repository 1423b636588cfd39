"""Matmuls in the precision their weights are stored in.

Quantize and dequantize carry scalars only; per-token and per-channel scales multiply the product. The compiler fuses a matmul
with its quantization in that form alone and would otherwise compute it in a wider type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgemma_trt.build.layers import TORCH_DTYPES, Layers, Node, TensorSpec
from dgemma_trt.weights import Linear, Precision, Weights

E4M3_MAX = 448.0
BLOCK = 16


class Matmuls:
    """The weights as nodes: large tensors as network inputs in the type they are stored in, or embedded as constants."""

    def __init__(self, layers: Layers, weights: Weights, embed: bool) -> None:
        self._layers, self._weights, self._embed = layers, weights, embed
        self._linears: dict[str, Linear] = {}
        self._nodes: dict[str, Node] = {}
        self._rounded: dict[tuple[str, Precision, float], tuple[Node, Node | None]] = {}
        self.input_names: list[str] = []

    def small(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A small plain tensor, to be a constant."""
        return self._weights.tensor(name).to(dtype)

    def large(self, name: str) -> Node:
        """A large plain tensor."""
        return self._node(name, self._weights.tensor(name))

    def _node(self, name: str, value: Tensor) -> Node:
        if name not in self._nodes:
            if self._embed:
                self._nodes[name] = self._layers.constant(name, value)
            else:
                packed = value.dtype == torch.uint8
                shape = (*value.shape[:-1], 2 * value.shape[-1]) if packed else tuple(value.shape)
                self._nodes[name] = self._layers.input(TensorSpec(name, TORCH_DTYPES[value.dtype], shape))
                self.input_names.append(name)
        return self._nodes[name]

    def linear(self, x: Node, name: str) -> Node:
        """x @ weight^T in bf16: x [rows, in] and weight [out, in], or x [1 or E, rows, in] and weight [E, out, in]."""
        if name not in self._linears:
            self._linears[name] = self._weights.linear(name)
        stored = self._linears[name]
        with self._layers.scope(name):
            match stored.precision:
                case Precision.BF16:
                    weight = self._layers.cast(self._node(f"{name}.weight", stored.weight), "bfloat16")
                    return self._layers.matmul(x, weight, transpose=True)
                case Precision.FP8 | Precision.FP8_STATIC:
                    return self._fp8(x, name, stored)
                case Precision.NVFP4 | Precision.NVFP4_WEIGHTS:
                    return self._nvfp4(x, name, stored)
