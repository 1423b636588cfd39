"""config.json and generation_config.json: both spellings, the reference's defaults, what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import DiffusionGemmaConfig, DiffusionGemmaTextConfig

from dgemma_trt.config import GenerationConfig, ModelConfig, read_json
from dgemma_trt.errors import UserError

LARGE: dict[str, Any] = {
    "model_type": "diffusion_gemma",
    "canvas_length": 256,
    "text_config": {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
        "vocab_size": 262144,
        "use_bidirectional_attention": "vision",
    },
}


def with_field(path: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(LARGE)
    *parents, last = path.split(".")
    target = data
    for parent in parents:
        target = target.setdefault(parent, {})
    target[last] = value
    return data


def test_sizes_of_the_26b_model() -> None:
    config = ModelConfig.from_dict(LARGE)
    kinds = [layer.sliding for layer in config.layers]
    assert kinds == ([True] * 5 + [False]) * 5
    sliding, full = config.layers[4], config.layers[5]
    assert (sliding.head_dim, sliding.kv_heads, sliding.rotary_dim, sliding.rope_theta) == (256, 8, 256, 10_000.0)
    assert (full.head_dim, full.kv_heads, full.rotary_dim, full.rope_theta) == (512, 2, 128, 1_000_000.0)


def test_absent_fields_take_the_defaults_of_the_reference() -> None:
    text = DiffusionGemmaTextConfig()
    needed = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
    config = ModelConfig.from_dict({"model_type": "diffusion_gemma", "text_config": needed})
    assert config.hidden_size == text.hidden_size
    assert config.dense_width == text.intermediate_size
    assert config.window == text.sliding_window
    assert config.vocab_size == text.vocab_size
    assert config.max_positions == text.max_position_embeddings
    assert config.rms_norm_eps == text.rms_norm_eps
    assert config.logit_softcap == text.final_logit_softcapping
    assert config.canvas_length == DiffusionGemmaConfig().canvas_length
    for layer in config.layers:
        own = text.per_layer_config[layer.index]
        assert layer.sliding == (text.layer_types[layer.index] == "sliding_attention")
        assert (layer.head_dim, layer.kv_heads) == (own.head_dim, own.num_key_value_heads)
        assert layer.heads == text.num_attention_heads


def test_a_config_that_transformers_saved_again_is_the_same_model(tmp_path: Path) -> None:
    """It writes per_layer_config, its numbers with leading zeros."""
    DiffusionGemmaConfig(**copy.deepcopy(LARGE)).save_pretrained(tmp_path)
    saved = read_json(tmp_path / "config.json")
    assert "05" in saved["text_config"]["per_layer_config"]
    assert ModelConfig.from_dict(saved) == ModelConfig.from_dict(LARGE)


def test_the_last_layer_is_full_attention_as_the_reference_forces_it() -> None:
    data = with_field("text_config.layer_types", ["sliding_attention"] * 30)
    assert [layer.index for layer in ModelConfig.from_dict(data).layers if not layer.sliding] == [29]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_type", "gemma4"),
        ("text_config.use_bidirectional_attention", "all"),
        ("text_config.tie_word_embeddings", False),
        ("tie_word_embeddings", False),
        ("text_config.attention_bias", True),
        ("text_config.hidden_activation", "silu"),
        ("text_config.rope_parameters.full_attention", {"rope_type": "yarn", "rope_theta": 1e6}),
        ("text_config.rope_parameters.sliding_attention", {"rope_type": "linear", "rope_theta": 1e4}),
        ("text_config.num_experts", None),
        ("text_config.hidden_size", -1),
        ("text_config.hidden_size", "2816"),
        ("text_config.top_k_experts", 129),
        ("text_config.num_key_value_heads", 7),
        ("text_config.layer_types", ["full_attention"]),
        ("text_config.layer_types", ["mamba"] * 30),
        ("text_config.final_logit_softcapping", None),
        ("text_config.num_kv_shared_layers", 4),
        ("text_config", None),
        ("text_config.per_layer_config", [1]),
        ("text_config.per_layer_config", {"0": 3}),
        ("text_config.per_layer_config", {"30": {"head_dim": 256}}),
        ("text_config.per_layer_config", {"5": {"head_dim": 512}, "05": {"head_dim": 512}}),
        ("text_config.per_layer_config", {"five": {"head_dim": 512}}),
        ("text_config.rope_parameters.full_attention", {"rope_theta": "x"}),
        ("text_config.rms_norm_eps", float("nan")),
        ("text_config.pad_token_id", "0"),
        ("canvas_length", 10**9),
        ("text_config.sliding_window", 10**40),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(path: str, value: Any) -> None:
    data = with_field(path, value)
    if "rope_parameters" in path:
        for kind in ("full_attention", "sliding_attention"):
            data["text_config"]["rope_parameters"].setdefault(kind, {"rope_theta": 1e4, "partial_rotary_factor": 1.0})
    with pytest.raises(UserError) as error:
        ModelConfig.from_dict(data, "here/config.json")
    message = str(error.value)
    assert "here/config.json" in message
    assert path.split(".")[-1] in message or "layer" in message or "rope_theta" in message


def test_generation_config_of_the_released_checkpoint() -> None:
    data = {
        "eos_token_id": [1, 106, 50],
        "max_new_tokens": 256,
        "max_denoising_steps": 48,
        "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.25},
        "t_min": 0.4,
        "t_max": 0.8,
        "stability_threshold": 2,
        "confidence_threshold": 0.005,
    }
    config = GenerationConfig.from_dict(data, 1)
    assert config == GenerationConfig((1, 106, 50), 48, 0.25, 0.4, 0.8, 2, 0.005)


def test_generation_config_defaults_and_refusals() -> None:
    assert GenerationConfig.from_dict({}, 7).end_token_ids == (7,)
    with pytest.raises(UserError, match="t_min"):
        GenerationConfig.from_dict({"t_min": "low"}, 1)
    with pytest.raises(UserError, match="eos_token_id"):
        GenerationConfig.from_dict({"eos_token_id": ["1"]}, 1)
    for sampler in ([1], "EB"):
        with pytest.raises(UserError, match="sampler_config"):
            GenerationConfig.from_dict({"sampler_config": sampler}, 1)
    with pytest.raises(UserError, match="OtherSampler"):
        GenerationConfig.from_dict({"sampler_config": {"_cls_name": "OtherSampler"}}, 1)


@pytest.mark.parametrize("content", ["{", "[1]", "", "[" * 100_000], ids=["open", "list", "empty", "deep"])
def test_a_damaged_json_file_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        read_json(path)
    path.write_text(json.dumps({"a": 1}))
    assert read_json(path) == {"a": 1}
