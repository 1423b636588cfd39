"""Matmuls in the precision their weights are stored in.

FP8: quantize and dequantize hold scalars; per-token, per-channel and per-expert scales multiply the product. The compiler fuses
a matmul with its quantization in that form alone and would otherwise compute it in a wider type. NVFP4: block scales are
dequantized by their global scale, which may be one for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgemma_trt import formats
from dgemma_trt.build.layers import TORCH_DTYPES, Layers, Node, TensorSpec
from dgemma_trt.errors import UserError
from dgemma_trt.weights import Linear, Precision, Weights, linear_shapes


class Matmuls:
    """The weights as nodes, and matmuls with them.

    Large tensors are network inputs in the type they are stored in, or constants when `embed`; small ones are always constants.
    """

    def __init__(self, layers: Layers, weights: Weights, embed: bool) -> None:
        self._layers, self._weights = layers, weights
        self._linears = {name: weights.linear(name) for name, _ in linear_shapes(weights.config)}
        self._rounded: dict[tuple[str, Precision, float], tuple[Node, Node]] = {}
        large = dict(self._large())
        self._nodes = {
            name: layers.constant(name, value) if embed else _input(layers, name, value) for name, value in large.items()
        }
        self.input_names = () if embed else tuple(large)

    def _large(self) -> Iterator[tuple[str, Tensor]]:
        yield "embed_tokens", self._weights.tensor("embed_tokens")
        for layer in self._weights.config.layers:
            yield f"{layer.name}.router.proj", self._weights.tensor(f"{layer.name}.router.proj")
        for name, stored in self._linears.items():
            yield f"{name}.weight", stored.weight
            if stored.weight_scale is not None and stored.precision is not Precision.FP8_STATIC:
                yield f"{name}.weight_scale", stored.weight_scale

    def small(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A small plain tensor, for a constant."""
        return self._weights.tensor(name).to(dtype)

    def large(self, name: str) -> Node:
        """A large tensor, as stored."""
        return self._nodes[name]

    def linear(self, x: Node, name: str) -> Node:
        """x @ weight^T in bf16: x [rows, in] and weight [out, in], or x [1 or E, rows, in] and weight [E, out, in].

        Raises:
            UserError: experts of one layer with different input_scales.
        """
        stored, weight = self._linears[name], self.large(f"{name}.weight")
        with self._layers.scope(name):
            match stored.precision:
                case Precision.BF16:
                    return self._layers.matmul(x, self._layers.cast(weight, "bfloat16"), transpose=True)
                case Precision.FP8:
                    return self._fp8_dynamic(x, weight, name, stored)
                case Precision.FP8_STATIC:
                    return self._fp8_static(x, weight, name, stored)
                case Precision.NVFP4:
                    x = self._round_nvfp4(x, _input_scale(name, stored))
            return self._layers.matmul(x, self._nvfp4_weight(weight, name, stored), transpose=True)

    # FP8

    def _fp8_dynamic(self, x: Node, weight: Node, name: str, stored: Linear) -> Node:
        """One scale a token, computed here, and one an output channel; formulas: `formats.round_fp8_per_token`."""
        layers = self._layers
        codes, token_scale = self._round_fp8_per_token(x)
        product = layers.matmul(codes, layers.dequantize(weight, layers.scalar(1.0), "bfloat16"), transpose=True)
        channel_scale = layers.unsqueeze(self.large(f"{name}.weight_scale"), [len(stored.shape) - 2])
        scaled = layers.elementwise("PROD", layers.cast(product, "float32"), token_scale)
        return layers.cast(layers.elementwise("PROD", scaled, channel_scale), "bfloat16")

    def _round_fp8_per_token(self, x: Node) -> tuple[Node, Node]:
        """Values of the codes, in bf16 without rounding, and their scale, float32 [..., rows, 1]."""
        key = (x.name, Precision.FP8, 0.0)
        if key not in self._rounded:
            layers, one = self._layers, self._layers.scalar(1.0)
            # From float32: rounding the quotient to bf16 first would round it twice.
            x = layers.cast(x, "float32")
            amax = layers.reduce("MAX", layers.unary("ABS", x), -1)
            amax = layers.select(layers.elementwise("GREATER", amax, 2.0**-24), amax, 1.0)
            inverse_scale = layers.elementwise("DIV", layers.number(formats.E4M3_MAX, amax), amax)
            codes = layers.quantize(layers.elementwise("PROD", x, inverse_scale), one, "fp8")
            self._rounded[key] = layers.dequantize(codes, one, "bfloat16"), layers.unary("RECIP", inverse_scale)
        return self._rounded[key]

    def _fp8_static(self, x: Node, weight: Node, name: str, stored: Linear) -> Node:
        """One calibrated scale for the input, and one for each matrix."""
        layers, scale = self._layers, stored.weight_scale
        assert scale is not None
        x = self._round_fp8_static(x, _input_scale(name, stored))
        if scale.ndim == 0:
            scale_node = layers.constant(f"{name}.weight_scale", scale.float())
            return layers.matmul(x, layers.dequantize(weight, scale_node, "bfloat16"), transpose=True)
        product = layers.matmul(x, layers.dequantize(weight, layers.scalar(1.0), "bfloat16"), transpose=True)
        scale_node = layers.constant(f"{name}.weight_scale", scale.float().reshape(-1, 1, 1))
        return layers.cast(layers.elementwise("PROD", layers.cast(product, "float32"), scale_node), "bfloat16")

    def _round_fp8_static(self, x: Node, input_scale: float) -> Node:
        key = (x.name, Precision.FP8_STATIC, input_scale)
        if key not in self._rounded:
            scale = self._layers.scalar(input_scale)
            rounded = self._layers.dequantize(self._layers.quantize(x, scale, "fp8"), scale, "bfloat16")
            self._rounded[key] = rounded, scale
        return self._rounded[key][0]

    # NVFP4

    def _nvfp4_weight(self, weight: Node, name: str, stored: Linear) -> Node:
        layers, global_scale = self._layers, stored.weight_scale_2
        assert global_scale is not None
        scale = layers.constant(f"{name}.weight_scale_2", global_scale.float())
        axis = None if global_scale.ndim == 0 else 0
        blocks = layers.dequantize(self.large(f"{name}.weight_scale"), scale, "float32", axis)
        return layers.cast(layers.dequantize(weight, blocks, "float32", len(stored.shape) - 1), "bfloat16")

    def _round_nvfp4(self, x: Node, input_scale: float) -> Node:
        key = (x.name, Precision.NVFP4, input_scale)
        if key not in self._rounded:
            layers, scale = self._layers, self._layers.scalar(input_scale)
            codes, block_scales = layers.dynamic_quantize(x, scale, formats.BLOCK)
            blocks = layers.dequantize(block_scales, scale, "float32")
            rounded = layers.cast(layers.dequantize(codes, blocks, "float32", len(x.shape) - 1), "bfloat16")
            self._rounded[key] = rounded, scale
        return self._rounded[key][0]


def _input(layers: Layers, name: str, value: Tensor) -> Node:
    *leading, last = value.shape
    shape = (*leading, 2 * last if value.dtype == torch.uint8 else last)
    return layers.input(TensorSpec(name, TORCH_DTYPES[value.dtype], shape))


def _input_scale(name: str, stored: Linear) -> float:
    """The one scale of a matmul's input; experts share an input and so must share its scale."""
    assert stored.input_scale is not None
    scales = stored.input_scale.float()
    low, high = scales.min().item(), scales.max().item()
    if low != high:
        raise UserError(
            f"{name}: its experts have different input_scales, from {low:.6g} to {high:.6g}; an engine rounds what they "
            "share once, with one scale: quantize again with one input scale for all experts of a layer"
        )
    return low
