"""Layers that multiply matrices, attention, and rotary embedding. See `oracle_layers`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dgemma_trt.build.oracle_formats import matmul, wide
from dgemma_trt.build.oracle_shapes import within


def matrix_multiply(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    """IMatrixMultiplyLayer: the last two dimensions, or one for a VECTOR; the others are broadcast.

    Accumulation is not documented: float32. (An engine may use TF32 for float32 inputs unless the builder's flag is cleared.)
    """
    first, second = layer.op0.name, layer.op1.name
    a = {"NONE": a, "TRANSPOSE": a.mT if a.ndim > 1 else a, "VECTOR": a.unsqueeze(-2)}[first]
    b = {"NONE": b, "TRANSPOSE": b.mT if b.ndim > 1 else b, "VECTOR": b.unsqueeze(-1)}[second]
    product = matmul(a, b)
    product = product.squeeze(-1) if second == "VECTOR" else product
    return product.squeeze(-1 if second == "VECTOR" else -2) if first == "VECTOR" else product


def einsum(layer: Any, *operands: Tensor) -> Tensor:
    """IEinsumLayer."""
    return torch.einsum(layer.equation, *(wide(x) for x in operands))


def rotary_embedding(layer: Any, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
    """IRotaryEmbeddingLayer: x [B, heads, S, D]; cos and sin [B, S, D / 2], or [positions, D / 2] looked up by position.

    Turns the first `rotary_embedding_dim` elements (0: all), in pairs of neighbours if interleaved, else of the two halves.
    """
    if positions is not None:
        cos, sin = (table[within(positions, len(table))] for table in (cos, sin))
    cos, sin = wide(cos).unsqueeze(1), wide(sin).unsqueeze(1)
    count = layer.rotary_embedding_dim or x.shape[-1]
    turned, rest = wide(x[..., :count]), wide(x[..., count:])
    one, two = (turned[..., ::2], turned[..., 1::2]) if layer.interleaved else turned.chunk(2, dim=-1)
    pair = [one * cos - two * sin, two * cos + one * sin]
    joined = torch.stack(pair, dim=-1).flatten(-2) if layer.interleaved else torch.cat(pair, dim=-1)
    return torch.cat([joined, rest], dim=-1)


def attention(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """IAttention: softmax(query key^T, masked) value over [B, heads, S, D]; it applies no scale of its own.

    A bool mask's true lets a query see a key; any other mask is added. Both are broadcast. Each key and value head serves as
    many query heads in a row as divide evenly. Not documented: scores and probabilities stay in float32, and a query that
    sees no key gets NaN.
    """
    attention = layer.attention
    if attention.norm_op.name != "SOFTMAX" or attention.normalization_quantize_scale is not None:
        raise ValueError("only a softmax that is not quantized is supported")
    if any(form.name != "PADDED_BHND" for form in (attention.query_form, attention.key_value_form)):
        raise ValueError("only the padded form is supported")
    if attention.query_lengths is not None or attention.key_value_lengths is not None:
        raise ValueError("lengths are not supported")
    batch, heads, rows, width = query.shape
    groups, keys = key.shape[1], key.shape[2]
    scores = matmul(query.reshape(batch, groups, heads // groups * rows, width), key.mT).reshape(batch, heads, rows, keys)
    offset = {"NONE": keys, "UPPER_LEFT": 0, "LOWER_RIGHT": keys - rows}[attention.causal_kind.name]
    seen = torch.ones(rows, keys, dtype=torch.bool).tril(offset)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + wide(mask)
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1)
    context = matmul(weights.reshape(batch, groups, heads // groups * rows, keys), value).reshape(
        batch, heads, rows, value.shape[-1]
    )
    return context if keys else torch.full_like(context, math.nan)
