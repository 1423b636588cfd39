"""Emits the mixed network as a TensorRT network definition, from weights, for whichever TensorRT module is given.

The network itself is dgemma_trt/model.py; here are its operations as layers. Hidden states are bf16; norms, router, rotation
and the vocabulary head compute in float32. All rows of a pass go through every matmul together, so that weights are read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dgemma_trt.build.attention import Groups, MixedMaskAttention
from dgemma_trt.build.experts import Routing, dense_experts
from dgemma_trt.build.head import read_vocabulary
from dgemma_trt.build.layers import Dimension, Layers, Log, Node, TensorSpec
from dgemma_trt.build.matmuls import Matmuls
from dgemma_trt.config import LayerConfig, WindowRule
from dgemma_trt.model import Group, network
from dgemma_trt.weights import Weights

TOP = 20
"""Alternatives a position that `top_logprobs` gives."""


@dataclass(frozen=True)
class NetworkOptions:
    """What an engine is made for; `max_context` counts every position of a request, its last canvas included.

    window_rule: see config.py. top_logprobs, debug_logits: further outputs. embed_weights: constants instead of inputs.
    dtype: of hidden states, keys and values; float32 is for comparing with other implementations.
    """

    max_batch: int
    max_context: int
    prefill_chunk: int
    canvas_length: int
    window_rule: WindowRule = "reference"
    top_logprobs: bool = False
    debug_logits: bool = False
    embed_weights: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


@dataclass(frozen=True)
class Emitted:
    """A finished network and everything that must live until it is compiled.

    inputs, outputs: in the network's order. weight_inputs: names of the inputs that are weights: `embed_tokens`,
    `layers.N.router.proj`, and matmul weights with the suffix of their tensor (`layers.0.experts.gate_proj.weight_scale`).
    constants: the tensor behind each constant layer, by the layer's name; fp4 ones packed in uint8.
    """

    trt: Any
    log: Log
    builder: Any
    network: Any
    profiles: tuple[Any, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weight_inputs: tuple[str, ...]
    constants: dict[str, Tensor]


def emit(weights: Weights, options: NetworkOptions, trt: Any) -> Emitted:
    """Writes the network. Of weights that become inputs only shape and type are looked at.

    Rows: canvases [B, T] and context [Bc, Tc]; `context_slot` [Bc] says which of the B rows a context row belongs to. Position
    -1 marks a row without a token (of any id in the vocabulary) and an empty cache slot; slot -1 a context row of no request.
    T, Bc, Tc and the caches' capacities may be 0. The caches have B rows: without canvases B stays and T is 0.

    Raises:
        UserError: weights that no lowering computes exactly.
    """
    log = Log(trt)
    builder = trt.Builder(log.logger)
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    layers = Layers(trt, builder.create_network(flags), log, options.dtype)
    ops = _TensorRTOps(layers, weights, options)
    network(ops, weights.config)
    layers.finish()
    profile = builder.create_optimization_profile()
    for spec in layers.inputs:
        if -1 in spec.shape:
            profile.set_shape(spec.name, spec.minimum, spec.optimum, spec.maximum)
    return Emitted(
        trt=trt,
        log=log,
        builder=builder,
        network=layers.network,
        profiles=(profile,),
        inputs=tuple(layers.inputs),
        outputs=tuple(layers.outputs),
        weight_inputs=ops.matmuls.input_names,
        constants=layers.constants,
    )


class _TensorRTOps:
    """The operations as layers. Rows are nodes [rows, width] in bf16, context rows first; both groups may be empty."""

    def __init__(self, layers: Layers, weights: Weights, options: NetworkOptions) -> None:
        self._layers, self._config, self._options = layers, weights.config, options
        config, hidden = self._config, self._config.hidden_size
        usual_cache, ring = min(4096, options.max_context), min(config.window, options.max_context)
        batch = self._batch = Dimension("batch", 1, options.max_batch, options.max_batch)
        canvas = self._canvas = Dimension("canvas", 0, options.canvas_length, options.canvas_length)
        context_batch = self._context_batch = Dimension("context_batch", 0, 1, options.max_batch)
        # A finished canvas is committed as one chunk.
        longest = max(options.prefill_chunk, options.canvas_length)
        chunk = self._chunk = Dimension("chunk", 0, options.canvas_length, longest)
        self._cached = {
            True: Dimension("sliding_cache", 0, ring, ring),
            False: Dimension("full_cache", 0, usual_cache, options.max_context),
        }
        canvas_ids = self._input("canvas_ids", "int32", batch, canvas)
        canvas_positions = self._input("canvas_positions", "int32", batch, canvas)
        self._soft = self._input("soft_embeddings", self._options.dtype, batch, canvas, hidden)
        self._temperature = self._input("temperature", "float32", batch)
        self._uniform = self._input("uniform", "float32", batch, canvas)
        context_ids = self._input("context_ids", "int32", context_batch, chunk)
        context_positions = self._input("context_positions", "int32", context_batch, chunk)
        context_slot = self._input("context_slot", "int32", context_batch)
        self._ids: dict[Group, Node] = {"canvas": canvas_ids, "context": context_ids}
        cached_positions = {
            sliding: self._input("sliding_positions" if sliding else "full_positions", "int32", batch, self._cached[sliding])
            for sliding in sorted({layer.sliding for layer in config.layers}, reverse=True)
        }
        self._caches = [(self._cache("k_cache", layer), self._cache("v_cache", layer)) for layer in config.layers]
        self.matmuls = Matmuls(layers, weights, options.embed_weights)
        with layers.scope("rows"):
            self._groups = Groups(layers, context_positions, canvas_positions)
            per_token = options.window_rule == "per-token"
            self._attention = MixedMaskAttention(layers, self._groups, context_slot, cached_positions, config.window, per_token)
        self._rotations: dict[tuple[float, int, int], tuple[Node, Node]] = {}

    def _cache(self, kind: str, layer: LayerConfig) -> Node:
        shape = (self._batch, layer.kv_heads, self._cached[layer.sliding], layer.head_dim)
        return self._input(f"{layer.name}.{kind}", self._options.dtype, *shape)

    def _input(self, name: str, dtype: str, *dimensions: int | Dimension) -> Node:
        return self._layers.input(TensorSpec(name, dtype, dimensions))

    def _output(self, name: str, dtype: str, node: Node, *dimensions: int | Dimension) -> None:
        self._layers.output(TensorSpec(name, dtype, dimensions), node)

    def _scaled(self, rows: Node) -> Node:
        return self._layers.elementwise("PROD", rows, self._config.hidden_size**0.5)

    def embed(self, group: Group) -> Node:
        with self._layers.scope("embed_tokens"):
            ids = self._layers.reshape(self._ids[group], [-1])
            return self._scaled(self._layers.rounded(self._layers.gather(self.matmuls.large("embed_tokens"), ids, 0)))

    def soft_embeddings(self) -> Node:
        return self._layers.reshape(self._soft, [-1, self._config.hidden_size])

    def join(self, context: Node, canvas: Node) -> Node:
        return self._groups.join(context, canvas)

    def canvas_only(self, x: Node) -> Node:
        return self._groups.canvas(x)

    def add(self, x: Node, y: Node) -> Node:
        return self._layers.elementwise("SUM", x, y)

    def scale_by_group(self, x: Node, name: str) -> Node:
        dtype = getattr(torch, self._options.dtype)
        with self._layers.scope(name):
            encoder, decoder = (
                self._layers.constant(f"{name}.{side}", self.matmuls.small(f"{name}.{side}").to(dtype).reshape(1, 1))
                for side in ("encoder", "decoder")
            )
            return self._layers.elementwise("PROD", x, self._layers.select(self._groups.is_context, encoder, decoder))

    def rms_norm(self, x: Node, name: str | None, head_dim: int | None = None) -> Node:
        with self._layers.scope(name or "norm_without_weight"):
            weight = (
                None
                if name is None
                else self._layers.constant(name, self.matmuls.small(name).reshape(*([1] * (1 if head_dim is None else 2)), -1))
            )
            if head_dim is None:
                return self._layers.rounded(self._norm(x, weight))
            heads = self._layers.reshape(x, [0, x.shape[1] // head_dim, head_dim])
            return self._layers.reshape(self._layers.rounded(self._norm(heads, weight)), [0, x.shape[1]])

    def _norm(self, x: Node, weight: Node | None) -> Node:
        """x [..., width] in float32 without its root mean square, times weight [..., width]."""
        layers = self._layers
        x = layers.cast(x, "float32")
        mean = layers.reduce("AVG", layers.elementwise("PROD", x, x), -1)
        root = layers.unary("SQRT", layers.elementwise("SUM", mean, self._config.rms_norm_eps))
        x = layers.elementwise("PROD", x, layers.unary("RECIP", root))
        return x if weight is None else layers.elementwise("PROD", x, weight)

    def linear(self, x: Node, name: str) -> Node:
        return self.matmuls.linear(x, name)

    def gelu_gate(self, gate: Node, up: Node) -> Node:
        return self._layers.gelu_gate(gate, up)

    def rotary(self, x: Node, layer: LayerConfig) -> Node:
        with self._layers.scope(f"{layer.name}.rotary"):
            heads = self._layers.reshape(x, [0, x.shape[1] // layer.head_dim, 1, layer.head_dim])
            rotated = self._layers.rotary(self._layers.cast(heads, "float32"), *self._rotation(layer))
            return self._layers.reshape(self._layers.rounded(rotated), [0, x.shape[1]])

    def _rotation(self, layer: LayerConfig) -> tuple[Node, Node]:
        """cos and sin of every row's angles, float32 [rows, 1, head_dim / 2]; elements that pass unrotated have angle 0."""
        key = (layer.rope_theta, layer.head_dim, layer.rotary_dim)
        if key not in self._rotations:
            exponents = torch.arange(0, layer.rotary_dim, 2).float() / layer.head_dim
            frequencies = torch.zeros(1, layer.head_dim // 2)
            frequencies[0, : layer.rotary_dim // 2] = 1.0 / layer.rope_theta**exponents
            constant = self._layers.constant(f"frequencies:{key}", frequencies)
            positions = self._layers.cast(self._groups.positions, "float32")
            angles = self._layers.unsqueeze(self._layers.elementwise("PROD", positions, constant), [1])
            self._rotations[key] = self._layers.unary("COS", angles), self._layers.unary("SIN", angles)
        return self._rotations[key]

    def mixed_mask_attention(self, q: Node, k: Node, v: Node, layer: LayerConfig) -> Node:
        with self._layers.scope(f"{layer.name}.self_attn"):
            rows, k_new, v_new = self._attention.attend(q, k, v, *self._caches[layer.index], layer)
        shape = (self._context_batch, layer.kv_heads, self._chunk, layer.head_dim)
        self._output(f"{layer.name}.k_new", self._options.dtype, k_new, *shape)
        self._output(f"{layer.name}.v_new", self._options.dtype, v_new, *shape)
        return rows

    def router_scores(self, x: Node, name: str) -> Node:
        with self._layers.scope(name):
            scale = self.matmuls.small(f"{name}.scale") * self._config.hidden_size**-0.5
            scaled = self._norm(x, self._layers.constant(f"{name}.scale/sqrt(hidden)", scale.reshape(1, -1)))
            # Where the compiler takes TF32, 11 bits of the scaled input are left; the reference's own bf16 leaves 8.
            matrix = self._layers.cast(self.matmuls.large(f"{name}.proj"), "float32")
            return self._layers.matmul(scaled, matrix, transpose=True)

    def choose_experts(self, scores: Node, name: str) -> Routing:
        layers = self._layers
        with layers.scope(name):
            weights, chosen = layers.top(layers.softmax(scores), self._config.experts_per_token)
            weights = layers.elementwise("DIV", weights, layers.reduce("SUM", weights, 1))
            per_expert = layers.constant(f"{name}.per_expert_scale", self.matmuls.small(f"{name}.per_expert_scale"))
            return Routing(layers.elementwise("PROD", weights, layers.gather(per_expert, chosen, 0)), chosen)

    def experts(self, x: Node, routing: Routing, name: str) -> Node:
        return dense_experts(self._layers, self.matmuls, x, routing, name, self._config.num_experts)

    def vocabulary_head(self, x: Node) -> None:
        with self._layers.scope("vocabulary"):
            self._vocabulary_head(x)

    def _vocabulary_head(self, x: Node) -> None:
        layers, words, cap = self._layers, self._config.vocab_size, self._config.logit_softcap
        batch, canvas, (b, t) = self._batch, self._canvas, self._groups.canvas_shape
        table = self.matmuls.large("embed_tokens")
        # bf16 operands would round the logits to bf16 too. In TF32, which the compiler may take, their products are exact.
        logits = layers.matmul(layers.cast(x, "float32"), layers.cast(table, "float32"), transpose=True)
        capped = layers.elementwise("PROD", layers.activation("TANH", layers.elementwise("DIV", logits, cap)), cap)
        capped = layers.reshape(capped, [b, t, words])
        z = layers.elementwise("DIV", capped, layers.unsqueeze(self._temperature, [1, 2]))
        seen = read_vocabulary(layers, layers.reshape(z, [-1, words]), layers.reshape(self._uniform, [-1, 1]))
        self._output("best_ids", "int32", layers.reshape(seen.best_ids, [b, t]), batch, canvas)
        self._output("sampled_ids", "int32", layers.reshape(seen.sampled_ids, [b, t]), batch, canvas)
        self._output("entropy", "float32", layers.reshape(seen.entropy, [b, t]), batch, canvas)
        self._output("best_logprob", "float32", layers.reshape(seen.best_logprob, [b, t]), batch, canvas)
        probabilities = layers.rounded(seen.probabilities)
        soft = self._scaled(layers.matmul(probabilities, layers.rounded(table), transpose=False))
        soft = layers.reshape(soft, [b, t, self._config.hidden_size])
        self._output("next_soft_embeddings", self._options.dtype, soft, batch, canvas, self._config.hidden_size)
        if self._options.top_logprobs:
            count = min(TOP, words)
            values, ids = layers.top(seen.shifted, count)
            logprobs = layers.elementwise("SUB", values, seen.log_total)
            self._output("top_ids", "int32", layers.reshape(ids, [b, t, count]), batch, canvas, count)
            self._output("top_logprobs", "float32", layers.reshape(logprobs, [b, t, count]), batch, canvas, count)
        if self._options.debug_logits:
            self._output("logits", "float32", capped, batch, canvas, words)
