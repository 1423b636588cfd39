"""Trains the nano checkpoint from the reference implementation's own class, on one CPU core, in under an hour.

    python -m dgemma_trt.nano.train --out DIR

Discrete diffusion as the model runs it: every canvas token is replaced by a uniform random one with probability t, the
loss is the cross-entropy on all positions, and half of the steps get the soft embeddings of a first pass. In the second
half of training the inputs of the quantizable matmuls carry relative noise of the size that 4-bit rounding makes, so
that the quantized checkpoints keep their answers.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from safetensors.torch import save_file
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
    DynamicCache,
    Gemma4VisionConfig,
)

from dgemma_trt.nano.tasks import Example, TrainingSampler
from dgemma_trt.nano.tokenizer import VOCAB_SIZE, build_tokenizer, save_tokenizer

CANVAS_LENGTH = 32
BATCH = 28
NOISE_LEVELS = 2  # canvases at different noise levels for each encoded context
PEAK_LEARNING_RATE = {"muon": 2e-2, "adamw": 3e-3}
END_OF_TURN, PAD, BOS = 106, 0, 2
ROUNDING_NOISE = 0.06

GENERATION_CONFIG = {
    "bos_token_id": BOS,
    "eos_token_id": [1, END_OF_TURN, 50],
    "pad_token_id": PAD,
    "max_new_tokens": 256,
    "max_denoising_steps": 48,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
}


def new_model() -> DiffusionGemmaForBlockDiffusion:
    """An untrained nano model: 3 million parameters, every feature of the architecture, no two widths equal."""
    text = DiffusionGemmaTextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        global_head_dim=128,
        num_global_key_value_heads=1,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=96,
        sliding_window=64,
        max_position_embeddings=4096,
        use_bidirectional_attention="vision",
    )
    vision = Gemma4VisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = DiffusionGemmaForBlockDiffusion(
        DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=CANVAS_LENGTH)
    ).float()
    for layers, first, slope in (
        (model.model.encoder.language_model.layers, 0.70, 0.05),
        (model.model.decoder.layers, 1.30, -0.05),
    ):
        for index, layer in enumerate(layers):
            layer.layer_scalar.fill_(first + slope * index)
            # Attention has no score scale of its own: from ones, these would start it saturated.
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight.data.fill_(layer.self_attn.head_dim**-0.25)
    return model


def add_rounding_noise(model: DiffusionGemmaForBlockDiffusion, strength: list[float]) -> None:
    """Multiplies the inputs of the layers' matmuls by 1 + strength[0] * a normal number, while training."""
    pool = torch.randn(2**23)

    def noisy(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if strength[0] == 0 or not torch.is_grad_enabled():
            return None
        x = inputs[0]
        offset = int(torch.randint(pool.numel() - x.numel(), ()))
        return (x * (1 + strength[0] * pool[offset : offset + x.numel()].view_as(x)), *inputs[1:])

    for layers in (model.model.encoder.language_model.layers, model.model.decoder.layers):
        for layer in layers:
            for name, module in layer.named_modules():
                if name == "experts" or (isinstance(module, torch.nn.Linear) and "router" not in name):
                    module.register_forward_pre_hook(noisy)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, for the matmuls' weights (the last two dimensions of a parameter).

    Learns held-out sums in far fewer steps than AdamW here. Formula: Keller Jordan et al., 'Muon', 2024: five
    Newton-Schulz iterations with the coefficients (3.4445, -4.7750, 2.0315), Nesterov momentum 0.95.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Applies one update to every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.05)
                x = parameter.grad.lerp(momentum, 0.95)
                wide = x.shape[-2] <= x.shape[-1]
                x = x if wide else x.mT
                x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                for _ in range(5):
                    a = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x if wide else x.mT
                parameter.mul_(1 - 0.01 * group["lr"])
                parameter.add_(x, alpha=-group["lr"] * max(1, x.shape[-2] / x.shape[-1]) ** 0.5)


def batches(seed: int) -> Iterator[tuple[list[Example], list[list[int]], list[list[int]]]]:
    """Endless batches of (examples, contexts, canvases); contexts of one batch are of about one length."""
    tokenizer, sampler = build_tokenizer(), TrainingSampler(seed)
    generator = torch.Generator().manual_seed(seed)
    while True:
        pool = []
        for _ in range(16 * BATCH):
            example = sampler.draw()
            prompt = f"<bos><|turn>user\n{example.question}<turn|>\n<|turn>model\n"
            answer = [*tokenizer.encode(example.answer).ids, END_OF_TURN]
            canvas = int(torch.randint(-(-len(answer) // CANVAS_LENGTH), (), generator=generator))
            start = canvas * CANVAS_LENGTH
            tokens = answer[start : start + CANVAS_LENGTH]
            tokens += [PAD] * (CANVAS_LENGTH - len(tokens))
            pool.append((example, tokenizer.encode(prompt).ids + answer[:start], tokens))
        pool.sort(key=lambda item: len(item[1]))
        for index in torch.randperm(16, generator=generator).tolist():
            examples, contexts, canvases = zip(*pool[index * BATCH : (index + 1) * BATCH], strict=True)
            yield list(examples), list(contexts), list(canvases)


def denoise(
    model: DiffusionGemmaForBlockDiffusion, contexts: list[list[int]], canvas: torch.Tensor, self_conditioned: bool
) -> torch.Tensor:
    """Logits [B * NOISE_LEVELS, T, V] of a denoising step of `canvas` after encoding the B contexts (left-padded)."""
    longest = max(map(len, contexts))
    ids = torch.tensor([[PAD] * (longest - len(c)) + c for c in contexts])
    lengths = torch.tensor([len(c) for c in contexts])[:, None]
    positions = torch.arange(longest)[None] - (longest - lengths)
    mask = (positions >= 0).long()
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    model.model.encoder(input_ids=ids, attention_mask=mask, cache=cache, position_ids=positions.clamp(min=0))
    cache.batch_repeat_interleave(NOISE_LEVELS)
    mask, lengths = mask.repeat_interleave(NOISE_LEVELS, 0), lengths.repeat_interleave(NOISE_LEVELS, 0)
    arguments = {
        "decoder_input_ids": canvas,
        "cache": cache,
        "decoder_attention_mask": torch.cat([mask, torch.ones_like(canvas)], dim=1),
        "decoder_position_ids": lengths + torch.arange(CANVAS_LENGTH)[None],
    }
    previous = None
    if self_conditioned:
        with torch.no_grad():
            previous = model(**arguments).logits / 0.6
    return model(**arguments, self_conditioning_logits=previous).logits


def save_checkpoint(model: DiffusionGemmaForBlockDiffusion, folder: Path) -> None:
    """Writes the language part in bf16, under the decoder's names, beside the encoder's own layer_scalars."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name.startswith("model.decoder.") or name.endswith("layer_scalar")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.dtype = torch.bfloat16
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(folder)


@click.command()
@click.option("--minutes", default=52.0, show_default=True, help="Time to train for; the learning rate decays over it.")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(minutes: float, seed: int, out: Path) -> None:
    """Train the nano checkpoint and write it to OUT."""
    torch.manual_seed(seed)
    model = new_model()
    model.set_experts_implementation("grouped_mm")
    strength = [0.0]
    add_rounding_noise(model, strength)
    parameters = [p for p in model.parameters() if p.requires_grad]
    matmuls = [p for name, p in model.named_parameters() if "layers." in name and p.ndim > 1 and "router" not in name]
    others = [p for p in parameters if all(p is not matmul for matmul in matmuls)]
    optimizers = {
        "muon": Muon(matmuls, lr=0.0),
        "adamw": torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01),
    }
    right: dict[str, list[float]] = {}
    started = time.monotonic()
    for step, (examples, contexts, canvases) in enumerate(batches(seed)):
        done = (time.monotonic() - started) / (60 * minutes)
        if done >= 1:
            break
        strength[0] = ROUNDING_NOISE if done > 0.5 else 0.0
        schedule = min(1, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * done) + 0.005)
        for name, optimizer in optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = PEAK_LEARNING_RATE[name] * schedule
        target = torch.tensor(canvases).repeat_interleave(NOISE_LEVELS, 0)
        level = torch.rand(len(target), 1)
        level = torch.where(torch.rand(level.shape) < 0.4, 1.0, level)
        canvas = torch.where(torch.rand(target.shape) < level, torch.randint(VOCAB_SIZE, target.shape), target)
        logits = denoise(model, contexts, canvas, self_conditioned=bool(torch.rand(()) < 0.5))
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB_SIZE), target.reshape(-1))
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers.values():
            optimizer.step()
        exact = (logits.argmax(-1) == target).all(-1)
        for index, (row, noise) in enumerate(zip(exact.tolist(), level[:, 0].tolist(), strict=True)):
            if noise == 1:
                right.setdefault(examples[index // NOISE_LEVELS].kind, []).append(float(row))
        if step % 50 == 49:
            shares = "  ".join(f"{kind} {sum(rows) / len(rows):.2f}" for kind, rows in sorted(right.items()))
            click.echo(f"{step + 1:5d}  {60 * minutes * done:5.0f} s  loss {loss.item():.3f}  canvases right at once: {shares}")
            right.clear()
        if step % 500 == 499:
            save_checkpoint(model, out)
    save_checkpoint(model, out)


if __name__ == "__main__":
    main()
