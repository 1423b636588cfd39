"""The model's weights under one set of names, whatever file they came from.

Names, here and everywhere: `embed_tokens`, `norm`, `self_conditioning.gate_proj`, `layers.N.self_attn.q_proj`,
`layers.N.mlp.gate_proj`, `layers.N.experts.gate_proj` (all experts stacked), `layers.N.router.scale`,
`layers.N.layer_scalar.encoder`, … A matmul's weight is a `Linear` in one of the formats below; everything else is a plain
tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from dgemma_trt import formats
from dgemma_trt.config import ModelConfig

PARTS = ("weight", "weight_scale", "weight_scale_2", "input_scale")
"""Suffixes of the tensors of a `Linear`."""


class Precision(StrEnum):
    """How a matmul's weight is stored and what its input is rounded to."""

    BF16 = "bf16"
    """Floating point as in the checkpoint, input not rounded."""
    FP8 = "fp8"
    """e4m3 weight, one scale an output channel; input rounded to e4m3 with one scale a token."""
    FP8_STATIC = "fp8-static"
    """e4m3 weight and input, one calibrated scale each."""
    NVFP4 = "nvfp4"
    """E2M1 weight and input in blocks of 16 with e4m3 scales, and a float32 scale over those."""
    NVFP4_WEIGHTS = "nvfp4-weights"
    """As NVFP4, input not rounded."""


@dataclass(frozen=True)
class Linear:
    """A matmul's weight, or the stacked weights of a layer's experts (one leading dimension E more).

    weight: [out, in] floating point or e4m3; NVFP4 packs two inputs a byte: uint8 [out, in / 2], low nibble first.
    weight_scale: FP8 float32 [out]; FP8_STATIC float32 []; NVFP4 e4m3 [out, in / 16].
    weight_scale_2: NVFP4 float32 [] ([E] for experts). input_scale: FP8_STATIC and NVFP4, float32 [] ([E] for experts).
    """

    precision: Precision
    weight: Tensor
    weight_scale: Tensor | None = None
    weight_scale_2: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape: [out, in], or [E, out, in] for experts."""
        *leading, last = self.weight.shape
        return (*leading, 2 * last if self.weight.dtype == torch.uint8 else last)

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by suffix."""
        return {part: getattr(self, part) for part in PARTS if getattr(self, part) is not None}

    def expert(self, index: int) -> Linear:
        """One expert's weight out of a stack."""
        picked = {suffix: tensor[index] for suffix, tensor in self.tensors().items()}
        return Linear(self.precision, **picked)

    def dequantize(self) -> Tensor:
        """The weight's value in float32, of the logical shape."""
        if self.precision is Precision.BF16:
            return self.weight.float()
        assert self.weight_scale is not None
        if self.precision in (Precision.FP8, Precision.FP8_STATIC):
            return formats.dequantize_fp8(self.weight, self.weight_scale)
        assert self.weight_scale_2 is not None
        return formats.dequantize_nvfp4(self.weight, self.weight_scale, self.weight_scale_2)

    def round_input(self, x: Tensor) -> Tensor:
        """x (float32 [rows, in]) as the matmul sees it after quantizing and dequantizing, in float32."""
        if self.precision is Precision.FP8:
            return formats.round_fp8_per_token(x)
        if self.precision is Precision.FP8_STATIC:
            assert self.input_scale is not None
            return formats.round_fp8(x, self.input_scale)
        if self.precision is Precision.NVFP4:
            assert self.input_scale is not None
            return formats.round_nvfp4(x, self.input_scale)
        return x


class Weights(Protocol):
    """Where the network's weights come from: a checkpoint folder or an engine directory."""

    @property
    def config(self) -> ModelConfig:
        """The model's sizes."""
        ...

    def tensor(self, name: str) -> Tensor:
        """A plain tensor, as stored."""
        ...

    def linear(self, name: str) -> Linear:
        """A matmul's weight."""
        ...


def linear_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and logical shapes ([out, in], experts [E, out, in]) of all matmul weights that may be quantized."""
    hidden, dense, expert = config.hidden_size, config.dense_width, config.expert_width
    yield from _gated_mlp("self_conditioning", hidden, dense)
    for layer in config.layers:
        attention, kv_width = f"{layer.name}.self_attn", layer.kv_heads * layer.head_dim
        yield f"{attention}.q_proj", (layer.heads * layer.head_dim, hidden)
        yield f"{attention}.k_proj", (kv_width, hidden)
        if layer.sliding:
            yield f"{attention}.v_proj", (kv_width, hidden)
        yield f"{attention}.o_proj", (hidden, layer.heads * layer.head_dim)
        yield from _gated_mlp(f"{layer.name}.mlp", hidden, dense)
        for name, shape in _gated_mlp(f"{layer.name}.experts", hidden, expert):
            yield name, (config.num_experts, *shape)


def _gated_mlp(name: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj", (width, hidden)
    yield f"{name}.up_proj", (width, hidden)
    yield f"{name}.down_proj", (hidden, width)


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors that are no quantizable matmul: embedding, norms, router, layer scalars."""
    hidden = (config.hidden_size,)
    yield "embed_tokens", (config.vocab_size, config.hidden_size)
    yield "norm", hidden
    yield "self_conditioning.pre_norm", hidden
    for layer in config.layers:
        for norm in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm",
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
            "router.scale",
        ):
            yield f"{layer.name}.{norm}", hidden
        yield f"{layer.name}.self_attn.q_norm", (layer.head_dim,)
        yield f"{layer.name}.self_attn.k_norm", (layer.head_dim,)
        yield f"{layer.name}.router.proj", (config.num_experts, config.hidden_size)
        yield f"{layer.name}.router.per_expert_scale", (config.num_experts,)
        yield f"{layer.name}.layer_scalar.encoder", (1,)
        yield f"{layer.name}.layer_scalar.decoder", (1,)
