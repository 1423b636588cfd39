"""The oracle: executes a finished INetworkDefinition with torch on a CPU, layer by layer.

It says what a network means to TensorRT, so that what the compiler is given can be compared with what a model should
compute. It is written from TensorRT's documentation of each layer and knows no model.

Every tensor has the type and the shape that the network states: a layer computes in float32 from its inputs as stored and
rounds once, to its output's type, as a strongly typed network implies. Matmuls accumulate in float32. Fused kernels of an
engine may keep more than that between layers, round in between (attention), or sum in another order.

What TensorRT leaves undefined is an error here (an index out of range, a reshape that cannot be inferred) or NaN (attention
to nothing), so that a network that depends on it shows. `oracle_layers` says so layer by layer.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgemma_trt.build.oracle_formats import DTYPES, is_float, pack_fp4, unpack_fp4
from dgemma_trt.build.oracle_layers import LAYERS, TAKES_CODES


class OracleError(RuntimeError):
    """A network that the oracle cannot execute, or one that does something undefined. Names the layer or tensor."""


@torch.inference_mode()
def execute(network: Any, trt: Any, inputs: Mapping[str, Tensor], constants: Mapping[str, Tensor | bytes]) -> dict[str, Tensor]:
    """Runs a network and returns its outputs by name.

    network: a finished INetworkDefinition. trt: its module, `tensorrt_rtx` or `tensorrt`.
    inputs: a tensor for each input of the network, of its type and shape; fp4 packed: uint8 [..., n / 2], low nibble first.
    constants: the values of constants that cannot be read back from a network (bf16, fp8, fp4), by the name of their layer:
        a tensor or its bytes. Those that can be read back (float32, integers) are; TensorRT copies none of them, so their
        arrays must still be alive.
    Outputs have the network's types; fp4 packed.

    Raises:
        OracleError: an input that is missing or does not fit, an unknown type of layer, something undefined.
    """
    steps = [_step(network.get_layer(index), index, trt) for index in range(network.num_layers)]
    results = [network.get_output(index) for index in range(network.num_outputs)]
    values = _Values(steps, results)
    for tensor in (network.get_input(index) for index in range(network.num_inputs)):
        values.bind(tensor, inputs)
    branches: dict[Any, list[_Step]] = defaultdict(list)
    for step in steps:
        if step.kind == "CONDITIONAL_OUTPUT":
            branches[step.conditional].append(step)
    for step in _in_order(steps):
        if step.done:
            continue
        step.done = True
        arguments = [None if tensor is None else values.get(tensor) for tensor in step.inputs]
        try:
            made = LAYERS[step.kind].run(step.layer, *([constants] if step.kind == "CONSTANT" else arguments))
            for tensor, value in zip(step.outputs, made if isinstance(made, tuple) else (made,), strict=True):
                values.store(tensor, value)
        except Exception as error:
            raise OracleError(f"{step}: {error}") from error
        if step.kind == "CONDITION":
            for output in branches[step.conditional]:
                chosen, other = output.inputs if arguments[0] else reversed(output.inputs)
                output.inputs = [chosen]
                values.release(other)
        for tensor in step.inputs:
            values.release(tensor)
    return {tensor.name: values.result(tensor) for tensor in results}


@dataclass(eq=False)
class _Step:
    """A layer to run. Its tensors are ITensors, of which the bindings keep one object each while it is alive."""

    index: int
    kind: str
    layer: Any
    inputs: list[Any]
    outputs: list[Any]
    conditional: Any
    done: bool = False

    def __str__(self) -> str:
        return f"layer {self.index}, {self.layer.name!r} ({self.kind})"


def _step(layer: Any, index: int, trt: Any) -> _Step:
    kind = layer.type.name
    if kind not in LAYERS:
        raise OracleError(f"layer {index}, {layer.name!r}, is of type {kind}, which the oracle does not know")
    # The network gives bare ILayers; the attributes are those of the class.
    layer.__class__ = getattr(trt, LAYERS[kind].interface)
    inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
    outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
    if kind not in TAKES_CODES and any(tensor is not None and tensor.dtype.name in ("FP8", "FP4") for tensor in inputs):
        raise OracleError(f"layer {index}, {layer.name!r} ({kind}), has an FP8 or FP4 input: dequantize it")
    return _Step(index, kind, layer, inputs, outputs, getattr(layer, "conditional", None))


def _in_order(steps: Sequence[_Step]) -> Iterator[_Step]:
    """Steps after those that they depend on, else in the network's order.

    What enters or leaves an if-conditional comes after its condition, by which time it is known which branch is left out.
    """
    maker: dict[Any, _Step] = {tensor: step for step in steps for tensor in step.outputs}
    maker |= {step.conditional: step for step in steps if step.kind == "CONDITION"}
    waits: Counter[int] = Counter()
    followers: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        needs = [*step.inputs, *([step.conditional] if step.kind.startswith("CONDITIONAL") else [])]
        for before in {maker[need].index for need in needs if need in maker}:
            waits[step.index] += 1
            followers[before].append(step.index)
    ready = [step.index for step in steps if not waits[step.index]]
    done = 0
    while ready:
        index = heapq.heappop(ready)
        done += 1
        yield steps[index]
        for follower in followers[index]:
            waits[follower] -= 1
            if not waits[follower]:
                heapq.heappush(ready, follower)
    if done < len(steps):
        raise OracleError(f"{len(steps) - done} layers depend on themselves")


class _Values:
    """The values of tensors, each kept until its last use."""

    def __init__(self, steps: Sequence[_Step], results: Sequence[Any]) -> None:
        self._values: dict[Any, Tensor] = {}
        self._packed: set[Any] = set()
        self._maker = {tensor: step for step in steps for tensor in step.outputs}
        self._uses = Counter(tensor for step in steps for tensor in step.inputs)
        self._uses.update(results)

    def bind(self, tensor: Any, inputs: Mapping[str, Tensor]) -> None:
        """Takes an input of the network. fp4 stays packed, as all the weights of a model may be inputs."""
        if tensor.name not in inputs:
            raise OracleError(f"input {tensor.name!r} is missing")
        value, fp4 = inputs[tensor.name], tensor.dtype.name == "FP4"
        shape = (*value.shape[:-1], 2 * value.shape[-1]) if fp4 else tuple(value.shape)
        if value.dtype != DTYPES[tensor.dtype.name] or not _fits(shape, tensor):
            raise OracleError(
                f"input {tensor.name!r} is {value.dtype} {shape}, the network says {tensor.dtype.name} {tuple(tensor.shape)}"
            )
        self._values[tensor] = value
        if fp4:
            self._packed.add(tensor)

    def get(self, tensor: Any) -> Tensor:
        """The value of a tensor; fp4 one code a byte."""
        value = self._values[tensor]
        return unpack_fp4(value) if tensor in self._packed else value

    def result(self, tensor: Any) -> Tensor:
        """The value of an output of the network."""
        value = self.get(tensor)
        return pack_fp4(value) if tensor.dtype.name == "FP4" else value

    def store(self, tensor: Any, value: Tensor) -> None:
        """Takes what a layer computed, rounded to the tensor's type; its shape must be the one that TensorRT inferred."""
        dtype = DTYPES[tensor.dtype.name]
        if value.dtype != dtype and not (_number(value.dtype) and _number(value.dtype) == _number(dtype)):
            raise ValueError(f"gives {value.dtype}, the network says {tensor.dtype.name}")
        if not _fits(tuple(value.shape), tensor):
            raise ValueError(f"gives shape {tuple(value.shape)}, the network says {tuple(tensor.shape)}")
        if self._uses[tensor]:
            self._values[tensor] = value.to(dtype)

    def release(self, tensor: Any) -> None:
        """One use less. What has none left is freed, and what made it, if it has not run yet, never will."""
        unused = [tensor]
        while unused:
            tensor = unused.pop()
            self._uses[tensor] -= 1
            if tensor is None or self._uses[tensor]:
                continue
            self._values.pop(tensor, None)
            step = self._maker.get(tensor)
            if step is not None and not step.done and not any(self._uses[output] for output in step.outputs):
                step.done = True
                unused.extend(step.inputs)


def _number(dtype: torch.dtype) -> str:
    """The kind of number among whose types a layer may round; empty where none may."""
    return "float" if is_float(dtype) else "integer" if dtype in (torch.int32, torch.int64) else ""


def _fits(shape: tuple[int, ...], tensor: Any) -> bool:
    stated = tuple(tensor.shape)
    return len(shape) == len(stated) and all(s in (-1, n) for n, s in zip(shape, stated, strict=True))
