"""Matmuls in the precision their weights are stored in.

What is quantized is dequantized to float32, multiplied, scaled and rounded to bf16 once. The compiler makes an FP8 or FP4
matmul with a float32 result of that, but only where quantize and dequantize hold one scale a matrix (and NVFP4's for blocks):
scales of a token, an output channel or an expert multiply the product instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from dgemma_trt import formats
from dgemma_trt.build.layers import Layers, Node
from dgemma_trt.errors import UserError
from dgemma_trt.weights import Linear, Precision, Weights, linear_shapes


class Matmuls:
    """The weights as nodes, and matmuls with them.

    Large tensors are network inputs in the type they are stored in, or constants when `embed`; small ones are always constants.
    """

    def __init__(self, layers: Layers, weights: Weights, embed: bool) -> None:
        self._layers, self._weights = layers, weights
        self._linears: dict[str, Linear] = {}
        self._rounded: dict[tuple[str, Precision, float], tuple[Node, Node | None]] = {}
        add = layers.constant if embed else layers.weight_input
        self._nodes = {name: add(name, value) for name, value in self._large()}
        self.input_names = () if embed else tuple(self._nodes)

    def _large(self) -> Iterator[tuple[str, Tensor]]:
        config = self._weights.config
        for name in ("embed_tokens", *(f"{layer.name}.router.proj" for layer in config.layers)):
            yield name, self._weights.tensor(name)
        for name, _ in linear_shapes(config):
            stored = self._weights.linear(name)
            yield f"{name}.weight", stored.weight
            # Of what is large only shape and type are kept: a checkpoint makes a copy where it stacks experts.
            small = replace(stored, weight=stored.weight.to("meta"))
            if stored.weight_scale is not None and stored.precision is not Precision.FP8_STATIC:
                yield f"{name}.weight_scale", stored.weight_scale
                small = replace(small, weight_scale=stored.weight_scale.to("meta"))
            self._linears[name] = small

    def small(self, name: str) -> Tensor:
        """A small plain tensor in float32, for a constant."""
        return self._weights.tensor(name).float()

    def large(self, name: str) -> Node:
        """A large tensor, as stored."""
        return self._nodes[name]

    def linear(self, x: Node, name: str) -> Node:
        """x @ weight^T in bf16: x [rows, in] and weight [out, in], or x [1 or E, rows, in] and weight [E, out, in].

        Raises:
            UserError: experts of one layer with different input_scales.
        """
        layers, stored, weight = self._layers, self._linears[name], self.large(f"{name}.weight")
        with layers.scope(name):
            match stored.precision:
                case Precision.BF16:
                    return layers.matmul(x, layers.rounded(weight), transpose=True)
                case Precision.NVFP4_WEIGHTS:
                    # There is no matmul of bf16 by FP4: the weight is unpacked first, whatever its scales look like.
                    scale = layers.constant(f"{name}.weight_scale_2", _present(stored.weight_scale_2))
                    weight = self._unpack_nvfp4(weight, name, scale, axis=0 if len(stored.shape) == 3 else None)
                    return layers.matmul(x, layers.rounded(weight), transpose=True)
                case Precision.FP8:
                    x, token_scale = self._round_fp8_per_token(x)
                    product = layers.matmul(x, layers.dequantize(weight, layers.scalar(1.0), "float32"), transpose=True)
                    channel_scale = layers.unsqueeze(self.large(f"{name}.weight_scale"), [len(stored.shape) - 2])
                    product = layers.elementwise("PROD", layers.elementwise("PROD", product, token_scale), channel_scale)
                case Precision.FP8_STATIC:
                    x = self._round_fp8(x, _input_scale(name, stored))
                    scale, expert_scale = self._matrix_scale(f"{name}.weight_scale", stored.weight_scale)
                    product = layers.matmul(x, layers.dequantize(weight, scale, "float32"), transpose=True)
                    product = self._times(product, expert_scale)
                case Precision.NVFP4:
                    x = self._round_nvfp4(x, _input_scale(name, stored))
                    scale, expert_scale = self._matrix_scale(f"{name}.weight_scale_2", stored.weight_scale_2)
                    product = layers.matmul(x, self._unpack_nvfp4(weight, name, scale), transpose=True)
                    product = self._times(product, expert_scale)
            return layers.rounded(product)

    # Weights

    def _matrix_scale(self, name: str, scale: Tensor | None) -> tuple[Node, Node | None]:
        """A matrix's scale to dequantize with, and what then multiplies the product: the scales of stacked experts."""
        value = _present(scale)
        if value.ndim == 0:
            return self._layers.constant(name, value), None
        return self._layers.scalar(1.0), self._layers.constant(name, value.reshape(-1, 1, 1))

    def _times(self, product: Node, scale: Node | None) -> Node:
        return product if scale is None else self._layers.elementwise("PROD", product, scale)

    def _unpack_nvfp4(self, weight: Node, name: str, global_scale: Node, axis: int | None = None) -> Node:
        """An NVFP4 weight in float32; `axis`: where there is one global scale for each expert."""
        scales = self._layers.dequantize(self.large(f"{name}.weight_scale"), global_scale, "float32", axis)
        return self._layers.dequantize(weight, scales, "float32", len(weight.shape) - 1)

    # Inputs, rounded once for all matmuls that share them

    def _round_fp8_per_token(self, x: Node) -> tuple[Node, Node | None]:
        """What `formats.round_fp8_per_token` gives, as float32 codes and their scales [..., rows, 1]."""
        key = (x.name, Precision.FP8, 0.0)
        if key not in self._rounded:
            layers, one = self._layers, self._layers.scalar(1.0)
            # In float32: a quotient rounded to bf16 would be rounded twice.
            x = layers.cast(x, "float32")
            amax = layers.reduce("MAX", layers.unary("ABS", x), -1)
            amax = layers.select(layers.elementwise("GREATER", amax, 2.0**-24), amax, 1.0)
            inverse_scale = layers.elementwise("DIV", layers.number(formats.E4M3_MAX, amax), amax)
            codes = layers.quantize(layers.elementwise("PROD", x, inverse_scale), one, "fp8")
            self._rounded[key] = layers.dequantize(codes, one, "float32"), layers.unary("RECIP", inverse_scale)
        return self._rounded[key]

    def _round_fp8(self, x: Node, input_scale: float) -> Node:
        """What `formats.round_fp8` gives."""
        key = (x.name, Precision.FP8_STATIC, input_scale)
        if key not in self._rounded:
            layers, scale = self._layers, self._layers.scalar(input_scale)
            codes = layers.quantize(layers.cast(x, "float32"), scale, "fp8")
            self._rounded[key] = layers.dequantize(codes, scale, "float32"), None
        return self._rounded[key][0]

    def _round_nvfp4(self, x: Node, input_scale: float) -> Node:
        """What `formats.round_nvfp4` gives."""
        key = (x.name, Precision.NVFP4, input_scale)
        if key not in self._rounded:
            layers, scale = self._layers, self._layers.scalar(input_scale)
            codes, scales = layers.dynamic_quantize(x, scale, formats.BLOCK)
            scales = layers.dequantize(scales, scale, "float32")
            self._rounded[key] = layers.dequantize(codes, scales, "float32", len(x.shape) - 1), None
        return self._rounded[key][0]


def _present(scale: Tensor | None) -> Tensor:
    assert scale is not None
    return scale.float()


def _input_scale(name: str, stored: Linear) -> float:
    """The one scale of a matmul's input; experts share an input and so must share its scale."""
    scales = _present(stored.input_scale)
    low, high = scales.min().item(), scales.max().item()
    if low != high:
        raise UserError(
            f"{name}: its experts have different input_scales, from {low:.6g} to {high:.6g}; an engine rounds what they share "
            "once, with one scale: quantize again with one input scale for all experts of a layer"
        )
    return low
