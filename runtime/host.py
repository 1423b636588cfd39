"""The host session: the network executed with torch, on a CPU or a CUDA device, with the formats' exact rounding.

It makes everything testable and runs any checkpoint without a GPU. Batch-invariant by construction: every matmul and
attention call holds one request's rows of one group and no padding, and a slot's context is written to its cache before its
canvas attends, so that what a request gets does not depend, bit for bit in float32, on who shares its passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from dgemma_trt.config import LayerConfig, ModelConfig, WindowRule
from dgemma_trt.errors import UserError
from dgemma_trt.model import Group, network
from dgemma_trt.runtime import session as passes
from dgemma_trt.runtime.session import CanvasResult, CanvasRows, ContextRows, Limits
from dgemma_trt.runtime.vocabulary import read_vocabulary
from dgemma_trt.weights import Linear, Weights

R = TypeVar("R")
Rows = list[Tensor]
Routing = list[tuple[Tensor, Tensor]]


class HostWeights:
    """Dequantizes weights to float32 on a device, keeping up to `budget` bytes of them."""

    def __init__(self, weights: Weights, device: torch.device, budget: int) -> None:
        self.config = weights.config
        self._weights, self._device, self._left = weights, device, budget
        self._linears: dict[str, Linear] = {}
        self._kept: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        """A plain tensor in float32."""
        return self._keep(name, lambda: self._weights.tensor(name).to(self._device, torch.float32))

    def linear(self, name: str) -> Linear:
        """A matmul's weight as stored."""
        if name not in self._linears:
            self._linears[name] = self._weights.linear(name)
        return self._linears[name]

    def matrix(self, name: str, expert: int | None = None) -> Tensor:
        """A matmul's weight, or one expert's, dequantized to float32 [out, in]."""
        stored = self.linear(name)
        if expert is None:
            return self._keep(name, lambda: stored.dequantize().to(self._device))
        return self._keep(f"{name}.{expert}", lambda: stored.expert(expert).dequantize().to(self._device))

    def _keep(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        made = make()
        size = made.numel() * made.element_size()
        if size <= self._left:
            self._left -= size
            self._kept[name] = made
        return made


class SlotCache:
    """Keys and values of one request: rotated, in order of position, the last W alone on sliding layers."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.length = 0
        self._entries: list[tuple[Tensor, Tensor] | None] = [None] * len(config.layers)

    def entry(self, layer: LayerConfig) -> tuple[Tensor, Tensor] | None:
        """(keys, values) [kv_heads, n, head_dim], the last at the newest position written; None when empty."""
        return self._entries[layer.index]

    def append(self, layer: LayerConfig, keys: Tensor, values: Tensor) -> None:
        """Adds the keys and values of the next tokens, dropping what leaves the window."""
        held = self._entries[layer.index]
        if held is not None:
            keys, values = torch.cat([held[0], keys], dim=1), torch.cat([held[1], values], dim=1)
        if layer.sliding:
            keys, values = keys[:, -self._config.window :], values[:, -self._config.window :]
        self._entries[layer.index] = (keys, values)


class HostSession:
    """Runs passes with torch; implements `Session`.

    dtype: what hidden states, keys and values are rounded to (float32 or bfloat16); matmuls accumulate in float32.
    """

    def __init__(
        self,
        weights: Weights,
        limits: Limits,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        window_rule: WindowRule = "reference",
        keep_bytes: int = 4 << 30,
    ) -> None:
        self._weights = HostWeights(weights, torch.device(device), keep_bytes)
        self._limits, self._dtype, self._window_rule = limits, dtype, window_rule
        self._device = torch.device(device)
        self._caches: dict[int, SlotCache] = {}

    @property
    def limits(self) -> Limits:
        """What this session was made for."""
        return self._limits

    @property
    def config(self) -> ModelConfig:
        """The model's sizes."""
        return self._weights.config

    def cache(self, slot: int) -> SlotCache:
        """The cache of `slot`, made when first asked for."""
        return self._caches.setdefault(slot, SlotCache(self.config))

    def run(self, context: Sequence[ContextRows], canvases: Sequence[CanvasRows]) -> list[CanvasResult]:
        """One pass; see `Session.run`.

        Raises:
            UserError: a position beyond the limits.
        """
        return self._pass(context, canvases, self._read)

    def logits(self, context: Sequence[ContextRows], canvases: Sequence[CanvasRows]) -> list[Tensor]:
        """One pass that returns each canvas's softcapped logits, float32 [T, V], instead of reading tokens off them."""
        return self._pass(context, canvases, lambda logits, _: logits)

    def reset(self, slot: int) -> None:
        """Forgets what the cache of `slot` holds."""
        self._caches.pop(slot, None)

    @torch.no_grad()
    def _pass(
        self, context: Sequence[ContextRows], canvases: Sequence[CanvasRows], read: Callable[[Tensor, CanvasRows], R]
    ) -> list[R]:
        both: list[passes.Rows] = [*context, *canvases]
        for rows in both:
            if rows.start + len(rows.ids) > self._limits.max_context:
                raise UserError(
                    f"position {rows.start + len(rows.ids) - 1} is beyond this session's limit of "
                    f"{self._limits.max_context} positions"
                )
            self.cache(rows.slot)
        ops = _HostOps(self._weights, self._caches, context, canvases, self._dtype, self._window_rule, read)
        result = network(ops, self._weights.config)
        for rows in context:
            self._caches[rows.slot].length += len(rows.ids)
        return result

    def _read(self, logits: Tensor, rows: CanvasRows) -> CanvasResult:
        seen = read_vocabulary(logits / rows.temperature, rows.uniform.to(logits.device))
        table = self._weights.tensor("embed_tokens")
        soft = (seen.probabilities @ table) / seen.total[:, None] * _embedding_scale(self._weights.config, self._dtype)
        return CanvasResult(seen.best_ids, seen.sampled_ids, seen.entropy, seen.best_logprob, soft.to(self._dtype))


def _embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    return torch.tensor(config.hidden_size**0.5).to(dtype).item()


class _HostOps(Generic[R]):
    """The operations on one pass's rows: a list with one tensor [n, width] a request and group, context first."""

    def __init__(
        self,
        weights: HostWeights,
        caches: dict[int, SlotCache],
        context: Sequence[ContextRows],
        canvases: Sequence[CanvasRows],
        dtype: torch.dtype,
        window_rule: WindowRule,
        read: Callable[[Tensor, CanvasRows], R],
    ) -> None:
        self._weights, self._caches, self._config = weights, caches, weights.config
        self._context, self._canvases = context, canvases
        self._dtype, self._window_rule, self._read = dtype, window_rule, read
        table = weights.tensor("embed_tokens")
        both: list[passes.Rows] = [*context, *canvases]
        self._positions = [torch.arange(rows.start, rows.start + len(rows.ids), device=table.device) for rows in both]
        self._rotations: dict[tuple[float, int, int], list[tuple[Tensor, Tensor]]] = {}

    def embed(self, group: Group) -> Rows:
        table, scale = self._weights.tensor("embed_tokens"), _embedding_scale(self._config, self._dtype)
        rows = self._context if group == "context" else self._canvases
        return [(table[each.ids.to(table.device)].to(self._dtype) * scale).to(self._dtype) for each in rows]

    def soft_embeddings(self) -> Rows:
        device = self._weights.tensor("embed_tokens").device
        empty = [torch.zeros(len(rows.ids), self._config.hidden_size) for rows in self._canvases]
        given = [rows.soft_embeddings for rows in self._canvases]
        return [(e if g is None else g).to(device, self._dtype) for e, g in zip(empty, given, strict=True)]

    def join(self, context: Rows, canvas: Rows) -> Rows:
        return [*context, *canvas]

    def canvas_only(self, x: Rows) -> Rows:
        return x[len(self._context) :]

    def add(self, x: Rows, y: Rows) -> Rows:
        return [a + b for a, b in zip(x, y, strict=True)]

    def scale_by_group(self, x: Rows, name: str) -> Rows:
        encoder, decoder = (self._weights.tensor(f"{name}.{side}").to(self._dtype) for side in ("encoder", "decoder"))
        first = len(self._context)
        return [rows * (encoder if index < first else decoder) for index, rows in enumerate(x)]

    def rms_norm(self, x: Rows, name: str | None, head_dim: int | None = None) -> Rows:
        weight = None if name is None else self._weights.tensor(name)
        return [self._norm(rows, weight, head_dim).to(self._dtype) for rows in x]

    def _norm(self, rows: Tensor, weight: Tensor | None, head_dim: int | None = None) -> Tensor:
        heads = rows.float().unflatten(-1, (-1, head_dim or rows.shape[-1]))
        heads = heads * (heads.pow(2).mean(-1, keepdim=True) + self._config.rms_norm_eps).pow(-0.5)
        return (heads if weight is None else heads * weight).flatten(-2)

    def linear(self, x: Rows, name: str) -> Rows:
        matrix, stored = self._weights.matrix(name), self._weights.linear(name)
        return [functional.linear(stored.round_input(rows.float()), matrix).to(self._dtype) for rows in x]

    def gelu_gate(self, gate: Rows, up: Rows) -> Rows:
        return [functional.gelu(g, approximate="tanh") * u for g, u in zip(gate, up, strict=True)]

    def rotary(self, x: Rows, layer: LayerConfig) -> Rows:
        rotated = []
        for rows, (cos, sin) in zip(x, self._rotation(layer), strict=True):
            heads = rows.float().unflatten(-1, (-1, 2, layer.head_dim // 2))
            first, second = heads[:, :, 0], heads[:, :, 1]
            turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=2)
            rotated.append(turned.flatten(1).to(self._dtype))
        return rotated

    def _rotation(self, layer: LayerConfig) -> list[tuple[Tensor, Tensor]]:
        key = (layer.rope_theta, layer.head_dim, layer.rotary_dim)
        if key not in self._rotations:
            exponents = torch.arange(0, layer.rotary_dim, 2).float() / layer.head_dim
            frequencies = torch.zeros(layer.head_dim // 2)
            frequencies[: layer.rotary_dim // 2] = 1.0 / layer.rope_theta**exponents
            angles = [p[:, None].float() * frequencies.to(p.device) for p in self._positions]
            self._rotations[key] = [(angle.cos()[:, None], angle.sin()[:, None]) for angle in angles]
        return self._rotations[key]

    def mixed_mask_attention(self, q: Rows, k: Rows, v: Rows, layer: LayerConfig) -> Rows:
        split = [[rows.unflatten(-1, (-1, layer.head_dim)).transpose(0, 1) for rows in group] for group in (q, k, v)]
        outputs = []
        for index, (queries, keys, values) in enumerate(zip(*split, strict=True)):
            if index < len(self._context):
                outputs.append(self._attend_context(index, queries, keys, values, layer))
            else:
                outputs.append(self._attend_canvas(index, queries, keys, values, layer))
        return [rows.transpose(0, 1).flatten(1) for rows in outputs]

    def _attend_context(self, index: int, q: Tensor, k: Tensor, v: Tensor, layer: LayerConfig) -> Tensor:
        rows, positions = self._context[index], self._positions[index]
        cache = self._caches[rows.slot]
        keys, values, key_positions = self._with_cached(cache, rows.start, k, v, positions, layer)
        distance = positions[:, None] - key_positions[None, :]
        seen = distance >= 0
        if layer.sliding:
            seen &= distance < self._config.window
        cache.append(layer, k, v)
        return _attend(q, keys, values, seen)

    def _attend_canvas(self, index: int, q: Tensor, k: Tensor, v: Tensor, layer: LayerConfig) -> Tensor:
        rows, positions = self._canvases[index - len(self._context)], self._positions[index]
        keys, values, key_positions = self._with_cached(self._caches[rows.slot], rows.start, k, v, positions, layer)
        if not layer.sliding or self._window_rule == "reference":
            return _attend(q, keys, values, None)
        distance = positions[:, None] - key_positions[None, :]
        return _attend(q, keys, values, distance.abs() < self._config.window)

    def _with_cached(
        self, cache: SlotCache, start: int, k: Tensor, v: Tensor, positions: Tensor, layer: LayerConfig
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and positions of what rows from `start` on may see at all: the cache's window and their own."""
        held = cache.entry(layer)
        if held is None:
            return k, v, positions
        keys, values = held
        if layer.sliding:
            visible = self._config.window - 1
            keys, values = (
                keys[:, -visible:] if visible else keys[:, :0],
                values[:, -visible:] if visible else values[:, :0],
            )
        cached = torch.arange(start - keys.shape[1], start, device=positions.device)
        return torch.cat([keys, k], dim=1), torch.cat([values, v], dim=1), torch.cat([cached, positions])

    def router_scores(self, x: Rows, name: str) -> Rows:
        scale = self._weights.tensor(f"{name}.scale") * self._config.hidden_size**-0.5
        matrix = self._weights.tensor(f"{name}.proj")
        return [functional.linear(self._norm(rows, scale), matrix) for rows in x]

    def choose_experts(self, scores: Rows, name: str) -> Routing:
        per_expert = self._weights.tensor(f"{name}.per_expert_scale")
        routing = []
        for rows in scores:
            weights, chosen = rows.softmax(-1).topk(self._config.experts_per_token, dim=-1)
            routing.append((weights / weights.sum(-1, keepdim=True) * per_expert[chosen], chosen))
        return routing

    def experts(self, x: Rows, routing: Routing, name: str) -> Rows:
        return [self._experts(rows, *chosen, name) for rows, chosen in zip(x, routing, strict=True)]

    def _experts(self, rows: Tensor, weights: Tensor, chosen: Tensor, name: str) -> Tensor:
        total = torch.zeros_like(rows, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            token, rank = (chosen == expert).nonzero(as_tuple=True)
            taken = rows[token]
            gate, up = (self._expert_linear(taken, f"{name}.{kind}", expert) for kind in ("gate_proj", "up_proj"))
            hidden = functional.gelu(gate, approximate="tanh") * up
            out = self._expert_linear(hidden, f"{name}.down_proj", expert)
            total[token] += weights[token, rank, None] * out.float()
        return total.to(self._dtype)

    def _expert_linear(self, rows: Tensor, name: str, expert: int) -> Tensor:
        rounded = self._weights.linear(name).expert(expert).round_input(rows.float())
        return functional.linear(rounded, self._weights.matrix(name, expert)).to(self._dtype)

    def vocabulary_head(self, x: Rows) -> list[R]:
        table, cap = self._weights.tensor("embed_tokens"), self._config.logit_softcap
        return [
            self._read(torch.tanh(functional.linear(rows.float(), table) / cap) * cap, canvas)
            for rows, canvas in zip(x, self._canvases, strict=True)
        ]


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """softmax(q k^T) v per head, [heads, n, d]; the query heads of a KV head are folded into its rows."""
    kv_heads, group = k.shape[0], q.shape[0] // k.shape[0]
    folded = q.reshape(1, kv_heads, group * q.shape[1], q.shape[2])
    mask = None if seen is None else seen.repeat(group, 1)
    out = functional.scaled_dot_product_attention(folded, k[None], v[None], attn_mask=mask, scale=1.0)
    return out.reshape(q.shape)
