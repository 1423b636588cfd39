"""Layers that compute element by element or over an axis. See `oracle_layers`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dgemma_trt.build.oracle_formats import is_float, wide


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """Integers as C divides them, toward zero; the documentation does not say."""
    return a / b if is_float(a.dtype) else torch.div(a, b, rounding_mode="trunc")


def _floor_divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.floor(a / b) if is_float(a.dtype) else torch.div(a, b, rounding_mode="floor")


_ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PROD": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "SUB": torch.sub,
    "DIV": _divide,
    "POW": torch.pow,
    "FLOOR_DIV": _floor_divide,
    "AND": torch.logical_and,
    "OR": torch.logical_or,
    "XOR": torch.logical_xor,
    "EQUAL": torch.eq,
    "GREATER": torch.gt,
    "LESS": torch.lt,
}


def elementwise(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    """IElementWiseLayer: dimensions of 1 are broadcast. NaN passes through MAX and MIN, which is not documented."""
    return _ELEMENTWISE[layer.op.name](wide(a), wide(b))


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "EXP": torch.exp,
    "LOG": torch.log,
    "SQRT": torch.sqrt,
    "RECIP": torch.reciprocal,
    "ABS": torch.abs,
    "NEG": torch.neg,
    "SIN": torch.sin,
    "COS": torch.cos,
    "TAN": torch.tan,
    "SINH": torch.sinh,
    "COSH": torch.cosh,
    "ASIN": torch.asin,
    "ACOS": torch.acos,
    "ATAN": torch.atan,
    "ASINH": torch.asinh,
    "ACOSH": torch.acosh,
    "ATANH": torch.atanh,
    "CEIL": torch.ceil,
    "FLOOR": torch.floor,
    "ERF": torch.erf,
    "NOT": torch.logical_not,
    "SIGN": torch.sign,
    "ROUND": torch.round,
    "ISINF": torch.isinf,
    "ISNAN": torch.isnan,
}


def unary(layer: Any, x: Tensor) -> Tensor:
    """IUnaryLayer; ROUND takes ties to even."""
    return _UNARY[layer.op.name](wide(x))


_ACTIVATION: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "RELU": lambda x, a, b: x.relu(),
    "SIGMOID": lambda x, a, b: x.sigmoid(),
    "TANH": lambda x, a, b: x.tanh(),
    "LEAKY_RELU": lambda x, a, b: torch.where(x >= 0, x, a * x),
    "ELU": lambda x, a, b: torch.where(x >= 0, x, a * torch.expm1(x)),
    "SELU": lambda x, a, b: b * torch.where(x > 0, x, a * torch.expm1(x)),
    "SOFTSIGN": lambda x, a, b: x / (1 + x.abs()),
    "SOFTPLUS": lambda x, a, b: a * torch.logaddexp(b * x, torch.zeros(())),
    "CLIP": lambda x, a, b: x.clamp(a, b),
    "HARD_SIGMOID": lambda x, a, b: (a * x + b).clamp(0, 1),
    "SCALED_TANH": lambda x, a, b: a * torch.tanh(b * x),
    "THRESHOLDED_RELU": lambda x, a, b: torch.where(x > a, x, torch.zeros(())),
    "GELU_ERF": lambda x, a, b: functional.gelu(x),
    "GELU_TANH": lambda x, a, b: functional.gelu(x, approximate="tanh"),
}


def activation(layer: Any, x: Tensor) -> Tensor:
    """IActivationLayer, whose `type` is the activation: formulas of trt.ActivationType."""
    return _ACTIVATION[layer.type.name](wide(x), layer.alpha, layer.beta)


def parametric_relu(layer: Any, x: Tensor, slope: Tensor) -> Tensor:
    """IParametricReLULayer: negative elements are multiplied by their slope."""
    x = wide(x)
    return torch.where(x < 0, wide(slope) * x, x)


def select(layer: Any, condition: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
    """ISelectLayer: what is not chosen leaves no trace, be it NaN."""
    return torch.where(condition, chosen, other)


def _extreme(reduce: Callable[..., Tensor], worst: float, x: Tensor, axes: list[int]) -> Tensor:
    if not is_float(x.dtype):
        worst = torch.iinfo(x.dtype).min if worst < 0 else torch.iinfo(x.dtype).max
    # torch refuses to reduce nothing.
    empty = [axis for axis in axes if x.shape[axis] == 0]
    if empty:
        x = x.new_full([1 if axis in empty else n for axis, n in enumerate(x.shape)], worst)
    return reduce(x, axes, keepdim=True)


_REDUCE: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "SUM": lambda x, axes: x.sum(axes, keepdim=True),
    "PROD": lambda x, axes: functools.reduce(lambda y, axis: y.prod(axis, keepdim=True), axes, x),
    "MAX": functools.partial(_extreme, torch.amax, -math.inf),
    "MIN": functools.partial(_extreme, torch.amin, math.inf),
    "AVG": lambda x, axes: x.mean(axes, keepdim=True),
}


def reduce(layer: Any, x: Tensor) -> Tensor:
    """IReduceLayer. Over nothing: sum 0, product 1, maximum the lowest value, minimum the highest, average NaN."""
    axes = _axes(layer.axes)
    reduced = _REDUCE[layer.op.name](wide(x), axes)
    return reduced if layer.keep_dims else reduced.squeeze(axes)


def softmax(layer: Any, x: Tensor) -> Tensor:
    """ISoftMaxLayer."""
    (axis,) = _axes(layer.axes)
    return torch.softmax(wide(x), axis)


def topk(layer: Any, x: Tensor, k: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """ITopKLayer: values, best first, and indices. Of equal values the lowest index wins, which is not documented."""
    (axis,) = _axes(layer.axes)
    count, largest = layer.k if k is None else int(k), layer.op.name == "MAX"
    if not 0 <= count <= x.shape[axis]:
        raise ValueError(f"the best {count} of {x.shape[axis]}")
    if count == 1:  # much faster than sorting a vocabulary
        best = x.argmax(axis, keepdim=True) if largest else x.argmin(axis, keepdim=True)
        return x.gather(axis, best), best
    values, indices = torch.sort(x, dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)


def cumulative(layer: Any, x: Tensor, axis: Tensor) -> Tensor:
    """ICumulativeLayer: running sums, in float32 one after the other; exclusive ones leave the element itself out."""
    x, along = wide(x), int(axis)
    x = x.flip(along) if layer.reverse else x
    sums = x.cumsum(along)
    if layer.exclusive and x.shape[along]:
        sums = torch.cat([torch.zeros_like(sums.narrow(along, 0, 1)), sums.narrow(along, 0, x.shape[along] - 1)], along)
    return sums.flip(along) if layer.reverse else sums


def normalization(layer: Any, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """INormalizationLayer with one group: (x - mean) / sqrt(variance + epsilon) * scale + bias."""
    if layer.num_groups != 1:
        raise ValueError(f"{layer.num_groups} groups: only 1 is supported")
    x = wide(x)
    centred = x - x.mean(_axes(layer.axes), keepdim=True)
    variance = centred.square().mean(_axes(layer.axes), keepdim=True)
    return centred / torch.sqrt(variance + layer.epsilon) * wide(scale) + wide(bias)


def _axes(bits: int) -> list[int]:
    """The axes of a bit mask."""
    return [axis for axis in range(8) if bits >> axis & 1]
