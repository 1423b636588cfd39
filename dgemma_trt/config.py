"""Reads config.json and generation_config.json of a DiffusionGemma checkpoint, in both spellings in use.

Absent fields take the reference's defaults (transformers' DiffusionGemmaTextConfig); fields that change the model in a way
that is not implemented here are refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dgemma_trt.errors import UserError

MODEL_TYPE = "diffusion_gemma"

WindowRule = Literal["reference", "per-token"]
"""What a sliding layer lets a canvas row see: the last W - 1 context tokens and the whole canvas, the same for every row
(`reference`, as transformers' DynamicCache), or keys closer than W to the row itself (`per-token`, as vLLM)."""


@dataclass(frozen=True)
class LayerConfig:
    """Geometry of one layer. `rotary_dim`: how many elements of a head are rotated; `rope_theta`: the base."""

    index: int
    sliding: bool
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rotary_dim: int

    @property
    def name(self) -> str:
        """Prefix of this layer's tensors, e.g. `layers.3`."""
        return f"layers.{self.index}"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of the language model; `window` is the sliding window W in tokens."""

    vocab_size: int
    hidden_size: int
    dense_width: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    window: int
    canvas_length: int
    max_positions: int
    rms_norm_eps: float
    logit_softcap: float
    pad_token_id: int | None
    bos_token_id: int | None
    layers: tuple[LayerConfig, ...]

    @classmethod
    def from_dict(cls, data: dict[str, Any], source: str = "config.json") -> ModelConfig:
        """Reads a parsed config.json.

        Raises:
            UserError: another architecture, a field that is not implemented, a missing or ill-typed field.
        """
        return _Reader(data, source).model_config()


@dataclass(frozen=True)
class GenerationConfig:
    """The checkpoint's own sampling parameters; temperatures divide the logits, entropy_bound is in nats.

    `max_new_tokens` of the file is not read: it would silently cut answers to one canvas.
    """

    end_token_ids: tuple[int, ...] = (1,)
    max_denoising_steps: int = 48
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1
    confidence_threshold: float = 0.005

    @classmethod
    def from_dict(
        cls, data: dict[str, Any], default_end: int | list[int] | None, source: str = "generation_config.json"
    ) -> GenerationConfig:
        """Reads a parsed generation_config.json; `default_end` is config.json's eos_token_id.

        Raises:
            UserError: a field of another type, or a sampler other than the entropy-bound one.
        """
        sampler = data.get("sampler_config") or {}
        if not isinstance(sampler, dict):
            raise UserError(f"{source}: sampler_config is {sampler!r}, expected an object")
        name = sampler.get("_cls_name", "EntropyBoundSamplerConfig")
        if name != "EntropyBoundSamplerConfig":
            raise UserError(f"{source}: sampler_config is {name!r}; only EntropyBoundSamplerConfig is implemented")
        end = data.get("eos_token_id", default_end)
        ends = tuple(end) if isinstance(end, list) else () if end is None else (end,)
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ends):
            raise UserError(f"{source}: eos_token_id is {end!r}, expected a token id or a list of them")
        values: dict[str, Any] = {"end_token_ids": ends}
        for field, kind in _GENERATION_FIELDS.items():
            found = sampler.get(field) if field == "entropy_bound" else data.get(field)
            if found is not None:
                if isinstance(found, bool) or not isinstance(found, int if kind is int else (int, float)):
                    raise UserError(f"{source}: {field} is {found!r}, expected {kind.__name__}")
                values[field] = kind(found)
        return cls(**values)


_GENERATION_FIELDS: dict[str, type[int] | type[float]] = {
    "max_denoising_steps": int,
    "entropy_bound": float,
    "t_min": float,
    "t_max": float,
    "stability_threshold": int,
    "confidence_threshold": float,
}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: the file is absent, unreadable, no JSON, or holds something other than an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds a {type(data).__name__}, expected an object")
    return data


class _Reader:
    """Reads one config.json, naming the file and field in every complaint."""

    def __init__(self, data: dict[str, Any], source: str) -> None:
        self._source = source
        found = data.get("model_type")
        if found != MODEL_TYPE:
            raise UserError(f"{source}: model_type is {found!r}; this program runs {MODEL_TYPE!r} only")
        text = data.get("text_config")
        if not isinstance(text, dict):
            raise UserError(f"{source}: text_config is missing; is this a DiffusionGemma checkpoint?")
        self._top, self._text = data, text

    def model_config(self) -> ModelConfig:
        self._refuse_what_is_not_implemented()
        config = ModelConfig(
            vocab_size=self._int("vocab_size", 262_144),
            hidden_size=self._int("hidden_size", 2304),
            dense_width=self._int("intermediate_size", 9216),
            num_experts=self._int("num_experts", None),
            experts_per_token=self._int("top_k_experts", None),
            expert_width=self._int("moe_intermediate_size", None),
            window=self._int("sliding_window", 512),
            canvas_length=self._int("canvas_length", 256, self._top),
            max_positions=self._int("max_position_embeddings", 131_072),
            rms_norm_eps=self._positive("rms_norm_eps", 1e-6),
            logit_softcap=self._positive("final_logit_softcapping", 30.0),
            pad_token_id=self._token("pad_token_id", 0),
            bos_token_id=self._token("bos_token_id", 2),
            layers=self._layers(),
        )
        if config.experts_per_token > config.num_experts:
            raise UserError(
                f"{self._source}: top_k_experts is {config.experts_per_token}, more than num_experts {config.num_experts}"
            )
        if config.canvas_length > config.max_positions:
            raise UserError(
                f"{self._source}: canvas_length is {config.canvas_length}, max_position_embeddings only {config.max_positions}"
            )
        return config

    def _refuse_what_is_not_implemented(self) -> None:
        expected: dict[str, tuple[Any, ...]] = {
            "use_bidirectional_attention": (None, "vision"),
            "tie_word_embeddings": (None, True),
            "attention_bias": (None, False),
            "hidden_activation": (None, "gelu_pytorch_tanh"),
            "num_kv_shared_layers": (None, 0),
            "hidden_size_per_layer_input": (None, 0),
            "attention_k_eq_v": (None, True),
        }
        for field, allowed in expected.items():
            for data in (self._text, self._top):
                if data.get(field) not in allowed:
                    raise UserError(
                        f"{self._source}: {field} is {data[field]!r}; only {allowed[-1]!r} is implemented, as in every "
                        "released DiffusionGemma checkpoint"
                    )

    def _layers(self) -> tuple[LayerConfig, ...]:
        count = self._int("num_hidden_layers", 30)
        types = self._text.get("layer_types")
        if types is None:
            types = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(count)]
        if not isinstance(types, list) or len(types) != count:
            raise UserError(f"{self._source}: layer_types must list one type for each of the {count} layers")
        # The reference forces the last layer to full attention, whatever the file says.
        types = [*types[:-1], "full_attention"]
        overrides = self._per_layer_config(count)
        return tuple(self._layer(index, kind, overrides) for index, kind in enumerate(types))

    def _layer(self, index: int, kind: str, overrides: dict[int, dict[str, Any]] | None) -> LayerConfig:
        if kind not in ("sliding_attention", "full_attention"):
            raise UserError(
                f"{self._source}: layer_types[{index}] is {kind!r}, expected 'sliding_attention' or 'full_attention'"
            )
        sliding = kind == "sliding_attention"
        head_dim, kv_heads = self._int("head_dim", 256), self._int("num_key_value_heads", 4)
        if overrides is not None:
            own = overrides.get(index, {})
            head_dim, kv_heads = self._int("head_dim", head_dim, own), self._int("num_key_value_heads", kv_heads, own)
            if unknown := sorted(set(own) - {"head_dim", "num_key_value_heads"}):
                raise UserError(f"{self._source}: per_layer_config.{index}.{unknown[0]} is not implemented")
        elif not sliding:
            head_dim = self._int("global_head_dim", 512)
            kv_heads = self._int("num_global_key_value_heads", kv_heads)
        heads = self._int("num_attention_heads", 8)
        if heads % kv_heads:
            raise UserError(f"{self._source}: layer {index}: {heads} query heads do not divide among {kv_heads} KV heads")
        theta, rotary_dim = self._rope(kind, head_dim)
        return LayerConfig(index, sliding, heads, kv_heads, head_dim, theta, rotary_dim)

    def _per_layer_config(self, count: int) -> dict[int, dict[str, Any]] | None:
        found = self._text.get("per_layer_config")
        if found is None:
            return None
        if not isinstance(found, dict) or not all(isinstance(own, dict) for own in found.values()):
            raise UserError(f"{self._source}: per_layer_config must map layer numbers to objects, found {found!r}")
        # transformers writes the numbers with leading zeros, so that they sort.
        numbers = [int(key) if str(key).isdecimal() else -1 for key in found]
        for key, number in zip(found, numbers, strict=True):
            if not 0 <= number < count or numbers.count(number) > 1:
                raise UserError(f"{self._source}: per_layer_config.{key} is not one of the {count} layers, or is there twice")
        return dict(zip(numbers, found.values(), strict=True))

    def _rope(self, kind: str, head_dim: int) -> tuple[float, int]:
        default: dict[str, dict[str, Any]] = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        }
        given = self._text.get("rope_parameters") or default
        parameters = given.get(kind) if isinstance(given, dict) else None
        if not isinstance(parameters, dict):
            raise UserError(f"{self._source}: rope_parameters.{kind} is {parameters!r}, expected an object")
        wanted = default[kind]["rope_type"]
        if parameters.get("rope_type", wanted) != wanted or parameters.get("factor", 1.0) != 1.0:
            raise UserError(
                f"{self._source}: rope_parameters.{kind} is {parameters!r}; only rope_type {wanted!r} with factor 1 is "
                "implemented"
            )
        theta = self._positive("rope_theta", None, parameters)
        fraction = self._positive("partial_rotary_factor", 1.0, parameters)
        if kind == "sliding_attention" and fraction != 1.0:
            raise UserError(f"{self._source}: rope_parameters.{kind}.partial_rotary_factor must be 1, found {fraction}")
        return theta, 2 * int(min(fraction, 1.0) * head_dim // 2)

    def _int(self, field: str, default: int | None, data: dict[str, Any] | None = None) -> int:
        value = (self._text if data is None else data).get(field)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self._source}: {field} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise UserError(f"{self._source}: {field} is {value!r}, expected a whole number from 1 to 2**31 - 1")
        return value

    def _positive(self, field: str, default: float | None, data: dict[str, Any] | None = None) -> float:
        value = (self._text if data is None else data).get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise UserError(f"{self._source}: {field} is {value!r}, expected a number above 0")
        return float(value)

    def _token(self, field: str, default: int) -> int | None:
        value = self._text.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise UserError(f"{self._source}: {field} is {value!r}, expected a token id")
        return value
