"""Number formats of TensorRT's tensors as the oracle holds them, and their rounding.

FP8 is e4m3fn (`torch.float8_e4m3fn`). FP4 is E2M1: sign, two exponent bits, one mantissa bit, the code being the bits;
inside the oracle one code a byte (uint8), packed two a byte, low nibble first, in files and in memory of an engine.
Rounding is to nearest, ties to even, saturating: TensorRT's developer guide, 'Quantization Schemes'.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "FP8": torch.float8_e4m3fn,
    "FP4": torch.uint8,
}
"""What holds the values of a tensor, by the name of its trt.DataType."""

FP8_MAX = 448.0
FP4_MAX = 6.0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
_HALFWAY = torch.tensor([(low + high) / 2 for low, high in pairwise(_MAGNITUDES)])
# A value halfway goes to the even code, so the way up from an odd code begins just below its halfway point.
_HALFWAY[1::2] = torch.nextafter(_HALFWAY[1::2], torch.zeros(()))
_PIECE = 1 << 24


def is_float(dtype: torch.dtype) -> bool:
    """Whether arithmetic layers take it as a floating-point type."""
    return dtype in (torch.float32, torch.float16, torch.bfloat16)


def wide(x: Tensor) -> Tensor:
    """x in the type that arithmetic is done in: float32 for floating point, itself otherwise."""
    return x.float() if is_float(x.dtype) else x


def to_fp8(x: Tensor) -> Tensor:
    """float32 to e4m3fn, saturating; NaN stays NaN."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def to_fp4(x: Tensor) -> Tensor:
    """float32 to E2M1 codes, one a byte, saturating; NaN gives the largest value."""
    codes = torch.bucketize(x.abs(), _HALFWAY.to(x.device), out_int32=True)
    return (codes + 8 * torch.signbit(x)).to(torch.uint8)


def from_fp4(codes: Tensor) -> Tensor:
    """E2M1 codes, one a byte, to float32."""
    values, table = torch.empty(codes.shape, device=codes.device), _E2M1.to(codes.device)
    # In pieces: an index takes wider integers than the codes are.
    for out, piece in zip(values.view(-1).split(_PIECE), codes.reshape(-1).split(_PIECE), strict=True):
        torch.index_select(table, 0, piece.int(), out=out)
    return values


def unpack_fp4(packed: Tensor) -> Tensor:
    """uint8 [..., n / 2], low nibble first, to codes [..., n]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def pack_fp4(codes: Tensor) -> Tensor:
    """Codes [..., n] to uint8 [..., n / 2], low nibble first."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def matmul(a: Tensor, b: Tensor, limit: int = 1 << 26) -> Tensor:
    """a @ b, accumulated in float32 and not rounded, converting at most `limit` elements of b to float32 at a time."""
    columns = max(1, limit * b.shape[-1] // max(1, b.numel()))
    if b.dtype == torch.float32 or columns >= b.shape[-1]:
        return wide(a) @ wide(b)
    a = wide(a)
    return torch.cat([a @ wide(part) for part in b.split(columns, dim=-1)], dim=-1)
