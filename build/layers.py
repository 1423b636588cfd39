"""Thin typed helpers over the TensorRT layer API: one network being written, its constants, inputs and outputs.

`trt` is whichever TensorRT module is in use (`tensorrt_rtx` or `tensorrt`; their layer APIs agree). Nodes are its ITensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

Node = Any
"""An ITensor."""

TORCH_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float8_e4m3fn: "fp8",
    torch.uint8: "fp4",
}
"""Names of TensorRT's types, which are the names in `trt` too. uint8 holds two E2M1 codes a byte, low nibble first."""


@dataclass(frozen=True)
class Dimension:
    """A dimension that varies from pass to pass. Inputs that share one must agree in it."""

    name: str
    minimum: int
    optimum: int
    maximum: int


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of the network. `dtype` is a name of `TORCH_DTYPES`; fp4 shapes count elements, not bytes."""

    name: str
    dtype: str
    dimensions: tuple[int | Dimension, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape with -1 where it varies."""
        return tuple(d if isinstance(d, int) else -1 for d in self.dimensions)

    @property
    def minimum(self) -> tuple[int, ...]:
        """Smallest shape."""
        return tuple(d if isinstance(d, int) else d.minimum for d in self.dimensions)

    @property
    def optimum(self) -> tuple[int, ...]:
        """Shape to optimize for."""
        return tuple(d if isinstance(d, int) else d.optimum for d in self.dimensions)

    @property
    def maximum(self) -> tuple[int, ...]:
        """Largest shape."""
        return tuple(d if isinstance(d, int) else d.maximum for d in self.dimensions)


def _shape(stored: Tensor) -> tuple[int, ...]:
    """Logical shape: fp4 has two elements a byte."""
    *leading, last = stored.shape or (1,)
    return (*leading, 2 * last) if stored.dtype == torch.uint8 else tuple(stored.shape)


class Log:
    """What TensorRT said while a network was made and compiled.

    A process has one logger: TensorRT ignores any other while a builder lives. It writes to the latest log.
    """

    def __init__(self, trt: Any) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.logger = _logger(trt)
        self.logger.latest = self


@cache
def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):
        latest: Log

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.latest.errors.append(message)
            elif severity == trt.ILogger.WARNING:
                self.latest.warnings.append(message)

    return Logger()


class Layers:
    """Adds layers to a strongly typed network; every layer is named `scope/kind.number`, constants by `constant`.

    dtype: the type of hidden states. `constants` holds the tensor behind each constant, by the constant layer's name: TensorRT
    reads that memory until the build ends, and gives nothing of bf16, FP8 and FP4 back.
    """

    def __init__(self, trt: Any, network: Any, log: Log, dtype: str) -> None:
        self.trt: Any = trt
        self.dtype = dtype
        self.network, self.log = network, log
        self.constants: dict[str, Tensor] = {}
        self.inputs: list[TensorSpec] = []
        self.outputs: dict[TensorSpec, Node] = {}
        self._constant_nodes: dict[str, Node] = {}
        self._shapes: dict[tuple[str, ...], Node] = {}
        self._scope, self._count = "", 0

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix of the names of the layers made inside."""
        before, self._scope = self._scope, name
        yield
        self._scope = before

    def _outputs(self, kind: str, layer: Any, count: int = 1) -> list[Node]:
        if layer is None:
            raise RuntimeError(f"{self._scope}: TensorRT refused a {kind} layer: {'; '.join(self.log.errors[-1:])}")
        layer.name = f"{self._scope}/{kind}.{self._count}"
        self._count += 1
        return [layer.get_output(index) for index in range(count)]

    def _output(self, kind: str, layer: Any) -> Node:
        return self._outputs(kind, layer)[0]

    # What goes in and out

    def input(self, spec: TensorSpec) -> Node:
        """A network input. Declare all before the first layer: each one makes TensorRT infer every shape so far again."""
        node = self.network.add_input(spec.name, getattr(self.trt, spec.dtype), spec.shape)
        for axis, dimension in enumerate(spec.dimensions):
            if isinstance(dimension, Dimension):
                node.set_dimension_name(axis, dimension.name)
        self.inputs.append(spec)
        return node

    def weight_input(self, name: str, value: Tensor) -> Node:
        """A network input with the type and shape of `value`."""
        return self.input(TensorSpec(name, TORCH_DTYPES[value.dtype], _shape(value)))

    def output(self, spec: TensorSpec, node: Node) -> None:
        """Makes `node` a network output, once all layers are there."""
        if node.dtype != getattr(self.trt, spec.dtype):
            raise RuntimeError(f"output {spec.name} is {node.dtype}, expected {spec.dtype}")
        self.outputs[spec] = node

    def finish(self) -> None:
        """Marks the outputs."""
        for spec, node in self.outputs.items():
            node.name = spec.name
            self.network.mark_output(node)

    def constant(self, name: str, value: Tensor) -> Node:
        """The constant `name`; made once, `value` must be the same each time. uint8 [..., n / 2] becomes fp4 [..., n]."""
        if name not in self._constant_nodes:
            value = value.detach().cpu().contiguous()
            shape = _shape(value)
            weights = self.trt.Weights(getattr(self.trt, TORCH_DTYPES[value.dtype]), value.data_ptr(), prod(shape))
            layer = self.network.add_constant(shape, weights)
            node = self._output("constant", layer)
            layer.name = name
            self.constants[name], self._constant_nodes[name] = value, node
        return self._constant_nodes[name]

    def number(self, value: float, like: Node) -> Node:
        """A constant of one element with the type and rank of `like`, to be used with it in elementwise layers."""
        dtype = self._torch_dtype(like)
        rank = len(like.shape)
        return self.constant(f"{value}:{TORCH_DTYPES[dtype]}:{rank}", torch.full((1,) * rank, value, dtype=dtype))

    def _torch_dtype(self, x: Node) -> torch.dtype:
        return next(dtype for dtype, name in TORCH_DTYPES.items() if getattr(self.trt, name) == x.dtype)

    def scalar(self, value: float) -> Node:
        """A float32 constant without dimensions, as scales are given."""
        return self.constant(f"{value}:float32:0", torch.tensor(value))

    # Shapes

    def size(self, x: Node, axis: int) -> Node:
        """Length of a dimension, int64 [1]; a shape tensor."""
        shape = self._output("shape", self.network.add_shape(x))
        return self.slice(shape, [axis], [1])

    def _dimensions(self, dimensions: Sequence[int | Node]) -> Node:
        """A shape tensor, made once: the compiler's time grows faster than the number of layers."""
        parts = [self.constant(f"{d}:int64:1", torch.tensor([d])) if isinstance(d, int) else d for d in dimensions]
        key = tuple(part.name for part in parts)
        if key not in self._shapes:
            self._shapes[key] = self.concatenate(parts, 0)
        return self._shapes[key]

    def reshape(self, x: Node, dimensions: Sequence[int | Node], before: Sequence[int] = (), after: Sequence[int] = ()) -> Node:
        """x transposed by `before`, reshaped, transposed by `after`.

        A dimension may be -1, once: what is left. Either some are shape tensors, or 0 stands for the length at that place in x.
        """
        layer = self.network.add_shuffle(x)
        if before:
            layer.first_transpose = before
        if all(isinstance(d, int) for d in dimensions):
            layer.reshape_dims = dimensions
        else:
            layer.set_input(1, self._dimensions(dimensions))
            layer.zero_is_placeholder = False
        if after:
            layer.second_transpose = after
        return self._output("shuffle", layer)

    def unsqueeze(self, x: Node, axes: Sequence[int]) -> Node:
        """x with dimensions of one inserted, which become `axes` of the result."""
        where = self.constant(f"{list(axes)}:int64:1", torch.tensor(list(axes)))
        return self._output("unsqueeze", self.network.add_unsqueeze(x, where))

    def squeeze(self, x: Node, axes: Sequence[int]) -> Node:
        """x without its dimensions `axes`, which are of one."""
        where = self.constant(f"{list(axes)}:int64:1", torch.tensor(list(axes)))
        return self._output("squeeze", self.network.add_squeeze(x, where))

    def transpose(self, x: Node, order: Sequence[int]) -> Node:
        """x with its dimensions in another order."""
        layer = self.network.add_shuffle(x)
        layer.first_transpose = order
        return self._output("shuffle", layer)

    def slice(self, x: Node, start: Sequence[int | Node], size: Sequence[int | Node], fill: float | None = None) -> Node:
        """`size` elements from `start` on; with `fill`, what lies outside of x has that value."""
        static = [d if isinstance(d, int) else 0 for d in start], [d if isinstance(d, int) else 0 for d in size]
        layer = self.network.add_slice(x, *static, [1] * len(start))
        for index, given in ((1, start), (2, size)):
            if not all(isinstance(d, int) for d in given):
                layer.set_input(index, self._dimensions(given))
        if fill is not None:
            layer.mode = self.trt.SampleMode.FILL
            dtype = self._torch_dtype(x)
            layer.set_input(4, self.constant(f"{fill}:{TORCH_DTYPES[dtype]}:0", torch.tensor(fill, dtype=dtype)))
        return self._output("slice", layer)

    def concatenate(self, parts: Sequence[Node], axis: int) -> Node:
        """The parts after each other."""
        layer = self.network.add_concatenation(list(parts))
        layer.axis = axis
        return self._output("concatenation", layer)

    def count_up(self, size: Node) -> Node:
        """0, 1, 2, … int32 [size]."""
        layer = self.network.add_fill([0], self.trt.FillOperation.LINSPACE, self.trt.int32)
        layer.set_input(0, size)
        layer.set_input(1, self.constant("0:int32:0", torch.tensor(0, dtype=torch.int32)))
        layer.set_input(2, self.constant("1:int32:1", torch.tensor([1], dtype=torch.int32)))
        return self._output("fill", layer)

    # Arithmetic

    def cast(self, x: Node, dtype: str) -> Node:
        """x in another type."""
        wanted = getattr(self.trt, dtype)
        return x if x.dtype == wanted else self._output("cast", self.network.add_cast(x, wanted))

    def rounded(self, x: Node) -> Node:
        """x in the type of hidden states."""
        return self.cast(x, self.dtype)

    def elementwise(self, operation: str, x: Node, y: Node | float) -> Node:
        """x `operation` y (a name of trt.ElementWiseOperation), broadcast over dimensions of one."""
        if isinstance(y, int | float):
            y = self.number(y, x)
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self._output(operation.lower(), self.network.add_elementwise(x, y, kind))

    def unary(self, operation: str, x: Node) -> Node:
        """A name of trt.UnaryOperation, applied to each element."""
        return self._output(operation.lower(), self.network.add_unary(x, getattr(self.trt.UnaryOperation, operation)))

    def activation(self, function: str, x: Node) -> Node:
        """A name of trt.ActivationType, applied to each element."""
        return self._output(function.lower(), self.network.add_activation(x, getattr(self.trt.ActivationType, function)))

    def reduce(self, operation: str, x: Node, axis: int, keep: bool = True) -> Node:
        """A name of trt.ReduceOperation, over one axis."""
        kind = getattr(self.trt.ReduceOperation, operation)
        return self._output(f"reduce_{operation.lower()}", self.network.add_reduce(x, kind, 1 << axis % len(x.shape), keep))

    def running_sum(self, x: Node, axis: int) -> Node:
        """Inclusive cumulative sum."""
        where = self.constant(f"{axis}:int32:0", torch.tensor(axis, dtype=torch.int32))
        kind = self.trt.CumulativeOperation.SUM
        return self._output("running_sum", self.network.add_cumulative(x, where, kind, False, False))

    def select(self, condition: Node, x: Node | float, y: Node | float) -> Node:
        """x where `condition`, else y; one of them may be a number."""
        if isinstance(x, int | float):
            x = self.number(x, y)
        elif isinstance(y, int | float):
            y = self.number(y, x)
        return self._output("select", self.network.add_select(condition, x, y))

    def softmax(self, x: Node) -> Node:
        """Over the last axis."""
        layer = self.network.add_softmax(x)
        layer.axes = 1 << len(x.shape) - 1
        return self._output("softmax", layer)

    def top(self, x: Node, count: int) -> tuple[Node, Node]:
        """The `count` largest of the last axis, largest first, and their indices (int32)."""
        layer = self.network.add_topk(x, self.trt.TopKOperation.MAX, count, 1 << len(x.shape) - 1)
        values, indices = self._outputs("topk", layer, 2)
        return values, indices

    def gather(self, x: Node, indices: Node, axis: int, batched: bool = False) -> Node:
        """x at `indices` along `axis`; batched: dimension 0 of both is walked together."""
        layer = self.network.add_gather(x, indices, axis)
        layer.num_elementwise_dims = int(batched)
        return self._output("gather", layer)

    def matmul(self, x: Node, y: Node, transpose: bool) -> Node:
        """x @ y, or x @ y^T; leading dimensions of one are broadcast."""
        none, transposed = self.trt.MatrixOperation.NONE, self.trt.MatrixOperation.TRANSPOSE
        return self._output("matmul", self.network.add_matrix_multiply(x, none, y, transposed if transpose else none))

    def attention(self, q: Node, k: Node, v: Node, mask: Node) -> Node:
        """softmax(q k^T) v, no score scale: q [B, heads, n, d], k, v [B, kv_heads, m, d], mask bool [B, 1, n, m]."""
        softmax, no_kind = self.trt.AttentionNormalizationOp.SOFTMAX, self.trt.CausalMaskKind.NONE
        layer = self.network.add_attention_v2(q, k, v, softmax, no_kind)
        layer.mask = mask
        # Heads of 512 have no fused kernel; where there is one, the compiler takes it all the same.
        layer.decomposable = True
        return self._output("attention", layer)

    def rotary(self, x: Node, cos: Node, sin: Node) -> Node:
        """x [B, heads, n, d] rotated, element i with i + d / 2; cos, sin [B, n, d / 2] of x's type."""
        return self._output("rotary", self.network.add_rotary_embedding(x, cos, sin, False, 0))

    # Compositions

    def indices(self, count: int) -> Node:
        """0, 1, … count - 1 as int32 [1, count]."""
        return self.constant(f"0..{count}:int32:2", torch.arange(count, dtype=torch.int32)[None])

    def first_true(self, condition: Node) -> Node:
        """int32 [rows, 1]: index of the first true in each row of bool [rows, n], n where there is none."""
        count = condition.shape[1]
        return self.reduce("MIN", self.select(condition, self.indices(count), count), 1)

    def one_hot(self, indices: Node, count: int) -> Node:
        """float32 [..., count]: 1 where int32 `indices` [...] point, else 0."""
        values = self.constant("[0, 1]:float32:1", torch.tensor([0.0, 1.0]))
        depth = self.constant(f"{count}:int32:0", torch.tensor(count, dtype=torch.int32))
        return self._output("one_hot", self.network.add_one_hot(indices, values, depth, -1))

    def gelu_gate(self, gate: Node, up: Node) -> Node:
        """gelu_tanh(gate) * up."""
        return self.elementwise("PROD", self.activation("GELU_TANH", gate), up)

    # Quantization

    def quantize(self, x: Node, scale: Node, dtype: str) -> Node:
        """x / scale, rounded; scale: a scalar."""
        return self._output("quantize", self.network.add_quantize(x, scale, getattr(self.trt, dtype)))

    def dequantize(self, x: Node, scale: Node, dtype: str, axis: int | None = None) -> Node:
        """x * scale; scale: a scalar, a vector along `axis`, or one element a block of `axis`."""
        layer = self.network.add_dequantize(x, scale, getattr(self.trt, dtype))
        if axis is not None:
            layer.axis = axis
        return self._output("dequantize", layer)

    def dynamic_quantize(self, x: Node, global_scale: Node, block: int) -> tuple[Node, Node]:
        """NVFP4 codes of x and e4m3 scales, one a block of the last axis, in units of `global_scale`."""
        layer = self.network.add_dynamic_quantize(x, len(x.shape) - 1, block, self.trt.fp4, self.trt.fp8)
        layer.set_input(1, global_scale)
        codes, scales = self._outputs("dynamic_quantize", layer, 2)
        return codes, scales
