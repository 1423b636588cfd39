"""What each type of layer computes, from TensorRT's documentation of it: the operator reference and NvInfer.h.

A function takes the layer, with its attributes, and the layer's inputs as stored, absent ones being None. It returns the
outputs before rounding, floating point in float32 and indices in int64: the oracle rounds to the types the network states.
What the documentation leaves open is said at the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from dgemma_trt.build import oracle_arithmetic as arithmetic
from dgemma_trt.build import oracle_matrices as matrices
from dgemma_trt.build import oracle_quantization as quantization
from dgemma_trt.build import oracle_shapes as shapes


class LayerKind(NamedTuple):
    """The class of the bindings that exposes the attributes of a type of layer, and what such a layer computes."""

    interface: str
    run: Callable[..., Tensor | tuple[Tensor, ...]]


LAYERS = {
    "ACTIVATION": LayerKind("IActivationLayer", arithmetic.activation),
    "ASSERTION": LayerKind("IAssertionLayer", shapes.assertion),
    "ATTENTION_INPUT": LayerKind("IAttentionInputLayer", matrices.attention),
    "ATTENTION_OUTPUT": LayerKind("IAttentionOutputLayer", shapes.identity),
    "CAST": LayerKind("ICastLayer", shapes.cast),
    "CONCATENATION": LayerKind("IConcatenationLayer", shapes.concatenation),
    "CONDITION": LayerKind("IConditionLayer", shapes.condition),
    "CONDITIONAL_INPUT": LayerKind("IIfConditionalInputLayer", shapes.identity),
    "CONDITIONAL_OUTPUT": LayerKind("IIfConditionalOutputLayer", shapes.identity),
    "CONSTANT": LayerKind("IConstantLayer", shapes.constant),
    "CUMULATIVE": LayerKind("ICumulativeLayer", arithmetic.cumulative),
    "DEQUANTIZE": LayerKind("IDequantizeLayer", quantization.dequantize),
    "DYNAMIC_QUANTIZE": LayerKind("IDynamicQuantizeLayer", quantization.dynamic_quantize),
    "EINSUM": LayerKind("IEinsumLayer", matrices.einsum),
    "ELEMENTWISE": LayerKind("IElementWiseLayer", arithmetic.elementwise),
    "FILL": LayerKind("IFillLayer", shapes.fill),
    "GATHER": LayerKind("IGatherLayer", shapes.gather),
    "IDENTITY": LayerKind("IIdentityLayer", shapes.identity),
    "MATRIX_MULTIPLY": LayerKind("IMatrixMultiplyLayer", matrices.matrix_multiply),
    "NON_ZERO": LayerKind("INonZeroLayer", shapes.non_zero),
    "NORMALIZATION": LayerKind("INormalizationLayer", arithmetic.normalization),
    "ONE_HOT": LayerKind("IOneHotLayer", shapes.one_hot),
    "PADDING": LayerKind("IPaddingLayer", shapes.padding),
    "PARAMETRIC_RELU": LayerKind("IParametricReLULayer", arithmetic.parametric_relu),
    "QUANTIZE": LayerKind("IQuantizeLayer", quantization.quantize),
    "REDUCE": LayerKind("IReduceLayer", arithmetic.reduce),
    "ROTARY_EMBEDDING": LayerKind("IRotaryEmbeddingLayer", matrices.rotary_embedding),
    "SCATTER": LayerKind("IScatterLayer", shapes.scatter),
    "SELECT": LayerKind("ISelectLayer", arithmetic.select),
    "SHAPE": LayerKind("IShapeLayer", shapes.shape_of),
    "SHUFFLE": LayerKind("IShuffleLayer", shapes.shuffle),
    "SLICE": LayerKind("ISliceLayer", shapes.slice_),
    "SOFTMAX": LayerKind("ISoftMaxLayer", arithmetic.softmax),
    "SQUEEZE": LayerKind("ISqueezeLayer", shapes.squeeze),
    "TOPK": LayerKind("ITopKLayer", arithmetic.topk),
    "UNARY": LayerKind("IUnaryLayer", arithmetic.unary),
    "UNSQUEEZE": LayerKind("IUnsqueezeLayer", shapes.unsqueeze),
}
"""By name of the trt.LayerType: `tensorrt` and `tensorrt_rtx` have the same."""

TAKES_CODES = {
    *("CONCATENATION", "CONDITIONAL_INPUT", "CONDITIONAL_OUTPUT", "DEQUANTIZE", "GATHER", "IDENTITY"),
    *("SELECT", "SHAPE", "SHUFFLE", "SLICE", "SQUEEZE", "UNSQUEEZE"),
}
"""Layers that may see FP8 and FP4 tensors: they move codes or decode them. For any other, codes are no numbers."""
