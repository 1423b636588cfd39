"""Quantizing and dequantizing layers, after the developer guide's 'Quantization Schemes' and the operator reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dgemma_trt.build.oracle_formats import FP4_MAX, from_fp4, to_fp4, to_fp8, wide


def quantize(layer: Any, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """IQuantizeLayer: x / scale, clipped and rounded to nearest, ties to even. Scale: see `_blocks`."""
    _refuse(zero)
    x = wide(x)
    blocks, laid = _blocks(x.shape, wide(scale), layer.axis)
    return _encode(layer.to_type.name, (x.reshape(blocks) / laid).reshape(x.shape))


def dequantize(layer: Any, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """IDequantizeLayer: x * scale, in float32 whatever the type of the scale. Scale: see `_blocks`."""
    _refuse(zero)
    values = from_fp4(x) if layer.get_input(0).dtype.name == "FP4" else x.float()
    blocks, laid = _blocks(values.shape, wide(scale), layer.axis)
    return values.reshape(blocks).mul_(laid).reshape(x.shape)


def dynamic_quantize(layer: Any, x: Tensor, double_scale: Tensor) -> tuple[Tensor, Tensor]:
    """IDynamicQuantizeLayer to NVFP4: codes, and an e4m3 scale for each block.

    A block's scale is its largest magnitude / 6, divided by the double-quantization scale and rounded to e4m3; elements are
    divided by the product of the rounded scale and the double-quantization scale. Not documented: float32 throughout, true
    divisions, in this order; a block whose scale rounds to 0 becomes zeros.
    """
    if (layer.to_type.name, layer.scale_type.name) != ("FP4", "FP8"):
        raise ValueError(f"{layer.to_type.name} with scales of {layer.scale_type.name}: only FP4 with FP8 is supported")
    x, outer = wide(x), wide(double_scale).reshape(())
    sizes = list(layer.block_shape) or [layer.block_size if d == layer.axis % x.ndim else 1 for d in range(x.ndim)]
    sizes = [n if size == -1 else size for size, n in zip(sizes, x.shape, strict=True)]
    blocks = [part for size, n in zip(sizes, x.shape, strict=True) for part in (n // size, size)]
    blocked, inside = x.reshape(blocks), tuple(range(1, len(blocks), 2))
    scales = to_fp8(blocked.abs().amax(inside, keepdim=True) / FP4_MAX / outer)
    divisor = scales.float() * outer
    codes = to_fp4(torch.where(divisor == 0, 0.0, blocked / divisor))
    return codes.reshape(x.shape), scales.squeeze(inside)


def _blocks(shape: Sequence[int], scale: Tensor, axis: int) -> tuple[list[int], Tensor]:
    """How to see a tensor of `shape` in blocks [n0, b0, n1, b1, ...], and the scale laid out to broadcast over them.

    A scale is one number, or one for each element of `axis`, or of the tensor's rank with one for each block of equal size.
    """
    if scale.numel() == 1:
        scale = scale.reshape([1] * len(shape))
    elif scale.ndim != len(shape):
        scale = scale.reshape([-1 if d == axis % len(shape) else 1 for d in range(len(shape))])
    if any(n and length % n for n, length in zip(scale.shape, shape, strict=True)):
        raise ValueError(f"a scale of {tuple(scale.shape)} does not divide {tuple(shape)} in blocks")
    blocks = [part for n, length in zip(scale.shape, shape, strict=True) for part in (n, length // n if n else 1)]
    return blocks, scale.reshape([part for n in scale.shape for part in (n, 1)])


def _encode(target: str, x: Tensor) -> Tensor:
    if target == "INT8":
        return x.round().clamp(-128, 127).to(torch.int8)
    return {"FP8": to_fp8, "FP4": to_fp4}[target](x)


def _refuse(zero: Tensor | None) -> None:
    if zero is not None and zero.any():
        raise ValueError("only symmetric quantization, with a zero point of 0")
