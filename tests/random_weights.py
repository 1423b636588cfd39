"""Random weights of a tiny model, of any precision, without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dgemma_trt import formats
from dgemma_trt.config import ModelConfig
from dgemma_trt.weights import Linear, Precision, linear_shapes, tensor_shapes

TINY: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "global_head_dim": 40,
    "num_global_key_value_heads": 1,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
    "sliding_window": 16,
    "max_position_embeddings": 512,
}


def tiny_config(**text: Any) -> ModelConfig:
    return ModelConfig.from_dict({"model_type": "diffusion_gemma", "text_config": {**TINY, **text}, "canvas_length": 8})


class RandomWeights:
    """Implements `Weights`; `precision` may be one for all matmuls or a function of their names."""

    def __init__(self, config: ModelConfig, precision: Precision | Callable[[str], Precision] = Precision.BF16) -> None:
        self._config = config
        generator = torch.Generator().manual_seed(0)
        of = precision if callable(precision) and not isinstance(precision, Precision) else lambda _: precision
        self.tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in tensor_shapes(config)}
        self.linears = {
            name: quantize(torch.randn(shape, generator=generator).bfloat16(), of(name))
            for name, shape in linear_shapes(config)
        }

    @property
    def config(self) -> ModelConfig:
        return self._config

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def linear(self, name: str) -> Linear:
        return self.linears[name]


def quantize(weight: Tensor, precision: Precision) -> Linear:
    """A weight [out, in] or [E, out, in] in another precision; input scales allow for inputs up to 20."""
    leading = weight.shape[:-2]
    match precision:
        case Precision.BF16:
            return Linear(precision, weight)
        case Precision.FP8:
            codes, scale = formats.quantize_fp8(weight)
            return Linear(precision, codes, scale)
        case Precision.FP8_STATIC:
            scale = weight.float().abs().amax((-2, -1)) / formats.E4M3_MAX
            codes = (weight.float() / scale[..., None, None]).to(torch.float8_e4m3fn)
            return Linear(precision, codes, scale, input_scale=torch.full(leading, 20 / formats.E4M3_MAX))
    codes, scale, global_scale = formats.quantize_nvfp4(weight)
    input_scale = torch.full(leading, 20 / formats.NVFP4_MAX) if precision is Precision.NVFP4 else None
    return Linear(precision, codes, scale, global_scale, input_scale)
