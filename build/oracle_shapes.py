"""Layers that convert, make, shape and move elements. See `oracle_layers`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dgemma_trt.build.oracle_formats import DTYPES, unpack_fp4


def constant(layer: Any, constants: Mapping[str, Tensor | bytes]) -> Tensor:
    """IConstantLayer: its weights, row-major. Those that the bindings give no array of come from `constants`."""
    kind, weights = layer.get_output(0).dtype.name, layer.weights
    if isinstance(weights, np.ndarray):
        return torch.from_numpy(weights.copy()).reshape(tuple(layer.shape))
    if layer.name not in constants:
        raise ValueError(f"{kind} cannot be read back from a network: give its value in `constants`")
    value = constants[layer.name]
    value = value if isinstance(value, Tensor) else torch.frombuffer(bytearray(value), dtype=torch.uint8)
    value = value.reshape(-1).view(DTYPES[kind])
    return (unpack_fp4(value) if kind == "FP4" else value).reshape(tuple(layer.shape))


def condition(layer: Any, condition: Tensor) -> tuple[Tensor, ...]:
    """IConditionLayer: the oracle reads the condition, a bool scalar, and leaves out the branch that is not taken."""
    return ()


def assertion(layer: Any, condition: Tensor) -> tuple[Tensor, ...]:
    """IAssertionLayer: an error unless every element is true."""
    if not condition.all():
        raise ValueError(f"assertion failed: {layer.message}")
    return ()


def identity(layer: Any, x: Tensor) -> Tensor:
    """IIdentityLayer between equal types, and the far sides of constructs computed elsewhere."""
    return x


def cast(layer: Any, x: Tensor) -> Tensor:
    """ICastLayer: to integers toward zero, to bool by comparing with 0. FP8 and FP4 are not for it."""
    if layer.to_type.name in ("FP8", "FP4"):
        raise ValueError(f"casts to {layer.to_type.name}: quantize instead")
    return x.to(DTYPES[layer.to_type.name])


def shape_of(layer: Any, x: Tensor) -> Tensor:
    """IShapeLayer: the dimensions, int64 [rank]."""
    return torch.tensor(x.shape)


def shuffle(layer: Any, x: Tensor, dims: Tensor | None = None) -> Tensor:
    """IShuffleLayer: transpose, reshape, transpose. A 0 copies a dimension if it is a placeholder, a -1 is inferred.

    The documentation does not say what -1 is where the other dimensions multiply to 0: what the network states, if it does.
    """
    x = x.permute(list(layer.first_transpose)[: x.ndim])
    second = list(layer.second_transpose)
    given = layer.reshape_dims if dims is None else dims.tolist()
    if given is not None:
        shape = [x.shape[i] if n == 0 and layer.zero_is_placeholder else n for i, n in enumerate(given)]
        if -1 in shape:
            axis, rest = shape.index(-1), -math.prod(shape)
            stated = layer.get_output(0).shape[second[: len(shape)].index(axis)]
            if not rest and stated == -1:
                raise ValueError(f"a reshape of {tuple(x.shape)} to {tuple(given)} cannot infer the -1")
            shape[axis] = x.numel() // rest if rest else stated
        x = x.reshape(shape)
    return x.permute(second[: x.ndim])


def squeeze(layer: Any, x: Tensor, axes: Tensor | None = None) -> Tensor:
    """ISqueezeLayer: without axes, the dimensions that are 1 in the network go, not those that happen to be."""
    stated = enumerate(layer.get_input(0).shape)
    removed = [axis for axis, n in stated if n == 1] if axes is None else [axis % x.ndim for axis in axes.tolist()]
    if any(x.shape[axis] != 1 for axis in removed):
        raise ValueError(f"squeezes axes {removed} of {tuple(x.shape)}")
    return x.reshape([n for axis, n in enumerate(x.shape) if axis not in removed])


def unsqueeze(layer: Any, x: Tensor, axes: Tensor) -> Tensor:
    """IUnsqueezeLayer: axes of the output."""
    rank = x.ndim + axes.numel()
    for axis in sorted(axis % rank for axis in axes.tolist()):
        x = x.unsqueeze(axis)
    return x


def concatenation(layer: Any, *parts: Tensor) -> Tensor:
    """IConcatenationLayer."""
    return torch.cat(parts, dim=layer.axis)


def fill(layer: Any, dims: Tensor | None = None, start: Tensor | None = None, delta: Tensor | None = None) -> Tensor:
    """IFillLayer, LINSPACE: start + sum over axes of delta[axis] * index, from inputs or else alpha and (1-D) beta."""
    if layer.operation.name != "LINSPACE":
        raise ValueError(f"{layer.operation.name} is random")
    dtype = DTYPES[layer.to_type.name]
    shape = _ints(dims, lambda: layer.shape)
    steps = [layer.beta] if delta is None else delta.reshape(-1).tolist()
    filled = torch.full(shape, layer.alpha if start is None else start.item(), dtype=dtype)
    for axis, (n, step) in enumerate(zip(shape, steps, strict=True)):
        filled = filled + along(torch.arange(n).to(dtype) * step, axis, len(shape))
    return filled


def slice_(
    layer: Any,
    x: Tensor,
    start: Tensor | None = None,
    size: Tensor | None = None,
    stride: Tensor | None = None,
    fill: Tensor | None = None,
    axes: Tensor | None = None,
) -> Tensor:
    """ISliceLayer: start + stride * index along each axis; beyond the input as `mode` says, FILL with an input's value."""
    mode = layer.mode.name
    listed = layer.axes if axes is None else axes.tolist()
    starts, sizes, strides = (
        _ints(start, lambda: layer.start),
        _ints(size, lambda: layer.shape),
        _ints(stride, lambda: layer.stride),
    )
    beyond = torch.zeros((), dtype=torch.bool)
    for axis, first, count, step in zip(
        range(x.ndim) if listed is None else [axis % x.ndim for axis in listed], starts, sizes, strides, strict=True
    ):
        wanted, length = first + step * torch.arange(count), x.shape[axis]
        inside = _SAMPLE[mode](wanted, max(length, 1))
        if mode == "FILL":
            beyond = beyond | along((wanted < 0) | (wanted >= length), axis, x.ndim)
            x = x if length else x.new_zeros([1 if i == axis else n for i, n in enumerate(x.shape)])
        x = _take(x, axis, inside)
    if mode == "FILL":
        if fill is None:
            raise ValueError("FILL without a value to fill in")
        x = torch.where(beyond, fill.reshape(()), x)
    return x


def _reflect(index: Tensor, length: int) -> Tensor:
    """... 2 1 0 1 2 ...: the edge itself is not repeated."""
    index = index.remainder(max(2 * (length - 1), 1))
    return torch.minimum(index, (2 * (length - 1) - index).abs())


_SAMPLE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "STRICT_BOUNDS": lambda index, length: index,
    "WRAP": lambda index, length: index.remainder(length),
    "CLAMP": lambda index, length: index.clamp(0, length - 1),
    "FILL": lambda index, length: index.clamp(0, length - 1),
    "REFLECT": _reflect,
}


def padding(layer: Any, x: Tensor) -> Tensor:
    """IPaddingLayer: zeros around the last two dimensions, or less of them where it is negative."""
    (top, left), (bottom, right) = layer.pre_padding_nd, layer.post_padding_nd
    return functional.pad(x, (left, right, top, bottom))


def gather(layer: Any, x: Tensor, indices: Tensor) -> Tensor:
    """IGatherLayer: DEFAULT picks along `axis`, ELEMENT as ONNX's GatherElements, ND as its GatherND.

    The first `num_elementwise_dims` dimensions of data and indices go together. Indices must lie within the data.
    """
    mode, axis, batch = layer.mode.name, layer.axis, layer.num_elementwise_dims
    if mode == "ELEMENT":
        return _bytes(x).gather(axis, within(indices, x.shape[axis])).view(x.dtype)
    if mode == "ND":
        picked = [within(i, x.shape[batch + n]) for n, i in enumerate(indices.unbind(-1))]
        together = [along(torch.arange(indices.shape[d]), d, indices.ndim - 1) for d in range(batch)]
        return x[(*together, *picked)]
    shape = (*x.shape[:axis], *indices.shape[batch:], *x.shape[axis + 1 :])
    if not batch:
        return _take(x, axis, indices.reshape(-1)).reshape(shape)
    count = math.prod(indices.shape[1:])
    flat = within(indices, x.shape[axis]).reshape(len(indices), *[1] * (axis - 1), count, *[1] * (x.ndim - axis - 1))
    return torch.take_along_dim(_bytes(x), flat, axis).view(x.dtype).reshape(shape)


def scatter(layer: Any, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """IScatterLayer: a copy of the data with updates written, ELEMENT along `axis`, ND as ONNX's ScatterND.

    Which of several updates of one element wins is undefined; here any.
    """
    if layer.mode.name == "ELEMENT":
        written = _bytes(x).scatter(layer.axis, within(indices, x.shape[layer.axis]), _bytes(updates))
        return written.view(x.dtype)
    written = x.clone()
    written[tuple(within(i, n) for i, n in zip(indices.unbind(-1), x.shape, strict=False))] = updates
    return written


def one_hot(layer: Any, indices: Tensor, values: Tensor, depth: Tensor) -> Tensor:
    """IOneHotLayer: values are (off, on); the new dimension comes at `axis` of the output."""
    axis, classes = layer.axis % (indices.ndim + 1), int(depth)
    hot = within(indices, classes).unsqueeze(axis) == along(torch.arange(classes), axis, indices.ndim + 1)
    return torch.where(hot, values[1], values[0])


def non_zero(layer: Any, x: Tensor) -> Tensor:
    """INonZeroLayer: indices [rank, count] in row-major order."""
    return x.nonzero().T


def _ints(given: Tensor | None, attribute: Callable[[], Sequence[int]]) -> list[int]:
    """Dimensions from an input or else from an attribute, which may be read only then."""
    return list(attribute()) if given is None else given.tolist()


def along(values: Tensor, axis: int, rank: int) -> Tensor:
    """A vector laid along one axis of `rank`, ready to broadcast."""
    return values.reshape([-1 if i == axis else 1 for i in range(rank)])


def _bytes(x: Tensor) -> Tensor:
    """x, or its bytes where torch cannot move elements of its type."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def within(indices: Tensor, length: int) -> Tensor:
    """Indices as int64, all of which must lie in [0, length)."""
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < length:
        raise ValueError(f"indices {int(indices.min())} to {int(indices.max())} reach beyond {length} elements")
    return indices.long()


def _take(x: Tensor, axis: int, indices: Tensor) -> Tensor:
    """Elements along an axis; a view where they are consecutive."""
    indices, count = within(indices, x.shape[axis]), indices.numel()
    if count and torch.equal(indices, indices[0] + torch.arange(count)):
        return x.narrow(axis, int(indices[0]), count)
    return x.index_select(axis, indices)
