"""Calibration by the reference's diffusion loop: what ModelOpt sees, and what of it we check.

A pass over a prompt or a finished canvas (encoder) and a denoising step (decoder) use the same weights on different
activations. ModelOpt observes the two apart and exports the larger range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dgemma_trt.config import GenerationConfig, ModelConfig
from dgemma_trt.quantize.reference import generation_settings

if TYPE_CHECKING:
    from transformers import DiffusionGemmaForBlockDiffusion

CANVASES = 2
"""How far each answer goes at most: one canvas that is committed, and one that sees it."""
STEPS = 8
"""Denoising steps a canvas gets at most. The temperature still runs over its whole range, in larger steps."""


@dataclass(frozen=True)
class InputRange:
    """Largest magnitude of a matmul's input seen by calibration, in each mode."""

    encoder: float
    decoder: float

    @property
    def merged(self) -> float:
        """The range that covers both."""
        return max(self.encoder, self.decoder)


@dataclass
class Coverage:
    """What calibration ran: passes by mode, commits among the encoder's, and the tokens that reached each expert.

    expert_tokens: by layer name, int64 [num_experts], both modes together.
    """

    prompts: int = 0
    encoder_passes: int = 0
    denoising_steps: int = 0
    expert_tokens: dict[str, Tensor] = field(default_factory=dict)

    @property
    def commits(self) -> int:
        """Finished canvases that the encoder read."""
        return self.encoder_passes - self.prompts

    @property
    def unseen_experts(self) -> dict[str, list[int]]:
        """By layer name, the experts that no token reached; they share their layer's input range."""
        unseen = {name: (tokens == 0).nonzero().flatten().tolist() for name, tokens in self.expert_tokens.items()}
        return {name: experts for name, experts in unseen.items() if experts}


def calibrate(
    model: DiffusionGemmaForBlockDiffusion,
    prompts: list[Tensor],
    config: ModelConfig,
    generation: GenerationConfig,
    progress: Callable[[str], None],
) -> Coverage:
    """Answers each prompt with the reference's own `generate`, up to `CANVASES` canvases each, reproducibly.

    One prompt at a time: padding would put activations into the ranges that no request has. Where every answer ends within
    its first canvas, one goes on past its end, so that a commit is seen.
    """
    _leave_weights_out(model)
    generation = replace(generation, max_denoising_steps=min(STEPS, generation.max_denoising_steps))
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _observed(model, config) as coverage:
        torch.manual_seed(0)
        for prompt in prompts:
            progress(f"calibrating: prompt {coverage.prompts + 1} of {len(prompts)}")
            _generate(model, prompt, config, generation, coverage, end=True)
        if coverage.commits == 0:
            _generate(model, prompts[0], config, generation, coverage, end=False)
    return coverage


def _leave_weights_out(model: DiffusionGemmaForBlockDiffusion) -> None:
    """ModelOpt has read every weight by now, and would read each again in every pass."""
    for name, module in model.named_modules():
        if "weight_quantizer" in name and hasattr(module, "disable_calib"):
            module.disable_calib()


def _generate(
    model: DiffusionGemmaForBlockDiffusion,
    prompt: Tensor,
    config: ModelConfig,
    generation: GenerationConfig,
    coverage: Coverage,
    *,
    end: bool,
) -> None:
    coverage.prompts += 1
    model.generate(
        prompt,
        generation_config=generation_settings(generation, config.pad_token_id, end=end),
        max_new_tokens=CANVASES * config.canvas_length,
    )


@contextmanager
def _observed(model: DiffusionGemmaForBlockDiffusion, config: ModelConfig) -> Iterator[Coverage]:
    coverage = Coverage()

    def count_encoder(*_: Any) -> None:
        coverage.encoder_passes += 1

    def count_decoder(*_: Any) -> None:
        coverage.denoising_steps += 1

    def count_tokens(layer: str, _: Any, arguments: tuple[Tensor, ...]) -> None:
        coverage.expert_tokens[layer] += torch.bincount(arguments[1].flatten(), minlength=config.num_experts)

    handles = [
        model.model.encoder.register_forward_pre_hook(count_encoder),
        model.model.decoder.register_forward_pre_hook(count_decoder),
    ]
    for layer in config.layers:
        coverage.expert_tokens[layer.name] = torch.zeros(config.num_experts, dtype=torch.int64)
        for layers in (model.model.encoder.language_model.layers, model.model.decoder.layers):
            handles.append(layers[layer.index].experts.register_forward_pre_hook(partial(count_tokens, layer.name)))
    try:
        yield coverage
    finally:
        for handle in handles:
            handle.remove()


def input_ranges(model: DiffusionGemmaForBlockDiffusion, linears: list[str]) -> dict[str, InputRange]:
    """The ranges that ModelOpt observed for the inputs of the matmuls of these names (`layers.N. …`)."""
    sides = (model.model.encoder.language_model, model.model.decoder)
    return {name: InputRange(*(_observed_range(side, name) for side in sides)) for name in linears}


def _observed_range(side: torch.nn.Module, name: str) -> float:
    parent, _, kind = name.rpartition(".")
    if parent.endswith(".experts"):
        # One quantizer serves all experts of a layer, and their gate and up together.
        quantizer = getattr(side.get_submodule(parent), f"{'down' if kind == 'down_proj' else 'gate_up'}_proj_input_quantizer")
    else:
        quantizer = side.get_submodule(name).input_quantizer
    return float(quantizer.amax)
