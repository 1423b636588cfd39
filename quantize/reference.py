"""A checkpoint's language model in transformers' own class, which is what ModelOpt quantizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dgemma_trt.checkpoint import Checkpoint
from dgemma_trt.config import GenerationConfig, read_json
from dgemma_trt.errors import UserError
from dgemma_trt.weights import linear_shapes, tensor_shapes

if TYPE_CHECKING:
    from transformers import DiffusionGemmaForBlockDiffusion

DECODER, ENCODER = "model.decoder.", "model.encoder.language_model."


def reference_model(checkpoint: Checkpoint) -> DiffusionGemmaForBlockDiffusion:
    """The model of a bf16 checkpoint, without its vision tower, on the CPU, in the checkpoint's own dtype.

    Its own dtype, because float32 would take twice the memory (104 GB for 25 billion weights) for the same result: quantized
    weights come out bit for bit the same, a calibrated range within bf16's rounding (0.4 %) of float32's.
    """
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    settings = read_json(checkpoint.folder / "config.json")
    # The class always builds a vision tower; this one is the smallest, and taken out again below.
    settings["vision_config"] = {
        "model_type": "gemma4_vision",
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1),
        **dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 16),
    }
    config = DiffusionGemmaConfig.from_dict(settings)
    config.architectures = [DiffusionGemmaForBlockDiffusion.__name__]
    model, loading = DiffusionGemmaForBlockDiffusion.from_pretrained(
        None,
        config=config,
        state_dict=_state(checkpoint),
        dtype=checkpoint.dtype,
        # ModelOpt finds the experts' matmuls by intercepting this implementation's; others it leaves unquantized.
        experts_implementation="eager",
        output_loading_info=True,
    )
    missing = {key for key in loading["missing_keys"] if ".vision_tower." not in key and ".embed_vision." not in key}
    for key in [*missing, *loading["unexpected_keys"], *loading["mismatched_keys"]]:
        raise UserError(f"{checkpoint.folder}: transformers does not load {key} as expected; try another version of it")
    model.model.encoder.vision_tower = torch.nn.Identity()
    model.model.encoder.embed_vision = torch.nn.Identity()
    return model.eval()


def _state(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The checkpoint's tensors under transformers' names; the experts' gate and up become one tensor."""
    state: dict[str, Tensor] = {}
    for name, _ in tensor_shapes(checkpoint.config):
        base, _, side = name.rpartition(".")
        if base.endswith("layer_scalar"):
            state[(ENCODER if side == "encoder" else DECODER) + base] = checkpoint.tensor(name)
        else:
            state[f"{DECODER}{name}" if name.endswith("scale") else f"{DECODER}{name}.weight"] = checkpoint.tensor(name)
    for name, shape in linear_shapes(checkpoint.config):
        weight = checkpoint.linear(name).weight
        experts, _, kind = name.rpartition(".")
        if len(shape) == 2:
            state[f"{DECODER}{name}.weight"] = weight
        elif kind == "down_proj":
            state[f"{DECODER}{name}"] = weight
        elif kind == "gate_proj":
            state[f"{DECODER}{experts}.gate_up_proj"] = torch.cat([weight, checkpoint.linear(f"{experts}.up_proj").weight], 1)
    return state


def generation_settings(config: GenerationConfig, pad_token_id: int | None, *, end: bool) -> Any:
    """The reference's own settings of the diffusion loop; without `end` no token ends the text."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
        DiffusionGemmaGenerationConfig,
        EntropyBoundSamplerConfig,
    )

    return DiffusionGemmaGenerationConfig(
        max_denoising_steps=config.max_denoising_steps,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=config.entropy_bound),
        t_min=config.t_min,
        t_max=config.t_max,
        stability_threshold=config.stability_threshold,
        confidence_threshold=config.confidence_threshold,
        eos_token_id=list(config.end_token_ids) if end and config.end_token_ids else None,
        pad_token_id=pad_token_id,
    )
