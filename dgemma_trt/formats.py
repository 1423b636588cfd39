"""FP8 and NVFP4 in torch, with the exact rounding of NVIDIA ModelOpt 0.47: quantize and dequantize weights, round activations.

Everything computes in float32 and takes leading dimensions: a weight is [..., out, in], an activation [..., rows, in], and a
scale that belongs to a whole matrix has the leading dimensions alone: [] for one matrix, [E] for E stacked experts.

Both formats round to the nearest value, ties to the even code, and saturate. e4m3: 448 at most, steps of 2^-9 near zero.
E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9
"""The smallest positive e4m3 value."""
E2M1_MAX = 6.0
NVFP4_MAX = E2M1_MAX * E4M3_MAX
"""What an NVFP4 element can hold at most, in units of the global scale."""
BLOCK = 16
"""Inputs that share an NVFP4 block scale."""

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1_PAIRS = torch.cartesian_prod(torch.cat([_E2M1, -_E2M1]), torch.cat([_E2M1, -_E2M1])).flip(-1)
"""The two values in each of the 256 bytes [256, 2]: the low nibble's first."""


# FP8


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes a weight to FP8 with one scale an output channel.

    Formula: scale = amax / 448, code = e4m3(weight / scale); a row of zeros gets scale 1. As ModelOpt's export of
    FP8_PER_CHANNEL_PER_TOKEN does (`to_quantized_weight`, `TensorQuantizer.export_amax`).

    Args:
        weight: floating point [..., out, in].

    Returns:
        codes float8_e4m3fn [..., out, in], scale float32 [..., out].
    """
    weight = weight.float()
    amax = weight.abs().amax(-1)
    scale = torch.where(amax == 0, E4M3_MAX, amax) / E4M3_MAX
    return _to_e4m3(weight / scale[..., None]), scale


def dequantize_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """The value of an FP8 weight: weight * scale. Formula: ModelOpt's `FP8QTensor.dequantize`.

    Args:
        weight: float8_e4m3fn [..., out, in].
        scale: float32, per output channel [..., out] or per matrix [...] (one dimension less).

    Returns:
        float32 [..., out, in].
    """
    return weight.float() * _broadcast(scale, weight)


def round_fp8_per_token(x: Tensor) -> Tensor:
    """Rounds activations to FP8 with one dynamic scale a token, and back.

    Formula: ModelOpt's `_fp8_eager` with amax per token: s = 448 / amax, e4m3(x * s) * (1 / s). A token whose amax is at most
    2^-24 takes s = 448, as there.

    Args:
        x: float32 [..., in].

    Returns:
        float32 [..., in].
    """
    amax = x.abs().amax(-1, keepdim=True)
    inverse_scale = E4M3_MAX / torch.where(amax <= 2.0**-24, 1.0, amax)
    return _to_e4m3(x * inverse_scale).float() * (1 / inverse_scale)


def round_fp8(x: Tensor, input_scale: Tensor) -> Tensor:
    """Rounds activations to FP8 with one calibrated scale, and back: e4m3(x / input_scale) * input_scale.

    Formula: ModelOpt's `fp8_scalar_qdq`, TensorRT's quantize and dequantize layers. (`_fp8_eager` multiplies by 448 / amax
    instead, which is one unit in the last place away.)

    Args:
        x: float32 [..., rows, in].
        input_scale: float32 [...], amax of the calibration / 448.

    Returns:
        float32 [..., rows, in].
    """
    scale = _broadcast(input_scale, x)
    return _to_e4m3(x / scale).float() * scale


# NVFP4


def quantize_nvfp4(weight: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes a weight to NVFP4: E2M1 codes, an e4m3 scale for each 16 inputs, a float32 scale over those.

    Formula: global = amax / (6 * 448); block = e4m3(block amax / (6 * global)), at least 2^-9, and 1 for a block of zeros;
    code = e2m1(weight / (block * global)). As ModelOpt's `NVFP4QTensor.quantize` does, except that a matrix of zeros, which
    divides by zero there, gets global scale 1.

    Args:
        weight: floating point [..., out, in], `in` a multiple of 16.
        global_scale: float32 [...]; by default each matrix's own.

    Returns:
        codes uint8 [..., out, in / 2] (low nibble first), block scale float8_e4m3fn [..., out, in / 16], global scale
        float32 [...].
    """
    weight = weight.float()
    if global_scale is None:
        amax = weight.abs().amax((-2, -1))
        global_scale = torch.where(amax == 0, NVFP4_MAX, amax) / NVFP4_MAX
    blocks = _blocks(weight)
    ratio = blocks.abs().amax(-1) / (E2M1_MAX * _broadcast(global_scale, weight))
    scale = torch.where(ratio == 0, 1.0, ratio).clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
    values = _round_e2m1(blocks / (scale.float() * _broadcast(global_scale, weight))[..., None]).flatten(-2)
    codes = torch.bucketize(values.abs(), _E2M1.to(weight.device)).to(torch.uint8) | (values.signbit().to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale, global_scale


def dequantize_nvfp4(weight: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """The value of an NVFP4 weight: code * (scale * global_scale). Formula: ModelOpt's `NVFP4QTensor.dequantize`.

    Args:
        weight: uint8 [..., out, in / 2], two E2M1 codes a byte, low nibble first.
        scale: float8_e4m3fn [..., out, in / 16].
        global_scale: float32 [...].

    Returns:
        float32 [..., out, in].
    """
    values = _E2M1_PAIRS.to(weight.device)[weight.int()].flatten(-2)
    return (_blocks(values) * (scale.float() * _broadcast(global_scale, weight))[..., None]).flatten(-2)


def round_nvfp4(x: Tensor, input_scale: Tensor) -> Tensor:
    """Rounds activations to NVFP4 and back: dynamic block scales over blocks of 16, under a calibrated global scale.

    Formula: ModelOpt's `fp4_fake_quant_block` (its kernel for GPUs with FP8): s = e4m3(min(block amax / (6 * input_scale),
    448)) * input_scale, e2m1(x / s) * s. A block whose scale rounds to zero becomes zero. What a GPU does too; ModelOpt's
    kernel also zeroes blocks whose s is below 1e-5 (an amax below 6e-5), and its `NVFP4QTensor`, meant for weights, raises s to
    2^-9 * input_scale instead: neither is followed.

    Args:
        x: float32 [..., rows, in], `in` a multiple of 16.
        input_scale: float32 [...], amax of the calibration / (6 * 448).

    Returns:
        float32 [..., rows, in].
    """
    global_scale = _broadcast(input_scale, x)
    blocks = _blocks(x)
    scale = _to_e4m3(blocks.abs().amax(-1) / (E2M1_MAX * global_scale)).float() * global_scale
    divisor = torch.where(scale == 0, torch.inf, scale)[..., None]
    return (_round_e2m1(blocks / divisor) * scale[..., None]).flatten(-2)


def _round_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value of x (float32, any shape), ties to the even code, at most 6."""
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return ((x / step).round() * step).clamp(-E2M1_MAX, E2M1_MAX)


def _to_e4m3(x: Tensor) -> Tensor:
    """Nearest float8_e4m3fn code of x; torch's own conversion gives NaN beyond 448, so saturate first."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _blocks(x: Tensor) -> Tensor:
    """[..., in] as [..., in / 16, 16]."""
    return x.unflatten(-1, (-1, BLOCK))


def _broadcast(scale: Tensor, matrix: Tensor) -> Tensor:
    """A scale of a matrix's leading dimensions with ones behind, to multiply that matrix (or its block scales)."""
    return scale.reshape(*scale.shape, *(1,) * (matrix.ndim - scale.ndim))
