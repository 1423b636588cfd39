"""Random DiffusionGemma models of the reference implementation, and its logits, for tests to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import random_weights
import torch
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
    DynamicCache,
    Gemma4VisionConfig,
)

TINY: dict[str, Any] = {
    **random_weights.TINY,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}


def random_model(seed: int = 0, canvas_length: int = 8, **text: Any) -> DiffusionGemmaForBlockDiffusion:
    """A random float32 model whose every tensor matters: norms, router scales and both layer_scalar sets randomised."""
    torch.manual_seed(seed)
    vision = Gemma4VisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
    )
    config = DiffusionGemmaConfig(
        text_config=DiffusionGemmaTextConfig(**{**TINY, **text}),
        vision_config=vision,
        canvas_length=canvas_length,
        initializer_range=0.3,
    )
    model = DiffusionGemmaForBlockDiffusion(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "vision" not in name and parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
        for layers in (model.model.encoder.language_model.layers, model.model.decoder.layers):
            for layer in layers:
                layer.layer_scalar.uniform_(0.6, 1.4)
    return model


def save(model: DiffusionGemmaForBlockDiffusion, folder: Path) -> Path:
    """Writes the model as a checkpoint folder, without its chatter."""
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def encode(model: DiffusionGemmaForBlockDiffusion, pieces: list[list[int]]) -> DynamicCache:
    """The reference's KV cache of one sequence, encoded piece by piece (prompt, then each committed canvas)."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    start = 0
    for piece in pieces:
        positions = torch.arange(start, start + len(piece))[None]
        model.model.encoder(input_ids=torch.tensor([piece]), cache=cache, position_ids=positions)
        start += len(piece)
    return cache


@torch.no_grad()
def logits(
    model: DiffusionGemmaForBlockDiffusion,
    pieces: list[list[int]],
    canvas: torch.Tensor,
    previous: torch.Tensor | None = None,
    sliding_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reference's softcapped logits [T, V] of one denoising step.

    previous: the last step's processed logits [T, V]. sliding_mask: bool [T, cached + T], true where a sliding layer's row
    may attend, in place of the reference's own.
    """
    cache = encode(model, pieces)
    start = sum(map(len, pieces))
    masks = None
    if sliding_mask is not None:
        full = torch.ones(len(canvas), start + len(canvas), dtype=torch.bool)
        masks = {"sliding_attention": sliding_mask[None, None], "full_attention": full[None, None]}
    out = model(
        decoder_attention_mask=masks,
        decoder_input_ids=canvas[None],
        cache=cache,
        decoder_position_ids=torch.arange(start, start + len(canvas))[None],
        self_conditioning_logits=None if previous is None else previous[None],
    )
    return out.logits[0]


@torch.no_grad()
def padded_logits(model: DiffusionGemmaForBlockDiffusion, prompts: list[list[int]], canvases: torch.Tensor) -> torch.Tensor:
    """The reference's logits [B, T, V] of a first step over prompts padded on the left, as its generate does it."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    model.model.encoder(input_ids=ids, attention_mask=mask, cache=cache)
    decoder_mask = torch.cat([mask, torch.ones_like(canvases)], dim=1)
    return model(decoder_input_ids=canvases, cache=cache, decoder_attention_mask=decoder_mask).logits
