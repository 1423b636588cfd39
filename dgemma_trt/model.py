"""The network of DiffusionGemma, written once, for whoever can carry out its operations.

A pass takes rows of two groups through the same layers: context rows (prompt tokens, or a finished canvas being committed;
causal; their keys and values are kept) and canvas rows (being denoised; bidirectional). The host session executes these
functions with torch, the compiler stage emits TensorRT layers from them; what they share is the `Ops` protocol.

Source of every formula: transformers' `DiffusionGemmaForBlockDiffusion`.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeVar

from dgemma_trt.config import LayerConfig, ModelConfig

Group = Literal["context", "canvas"]
Rows = TypeVar("Rows")
Routing = TypeVar("Routing")
Read = TypeVar("Read", covariant=True)


class Ops(Protocol[Rows, Routing, Read]):
    """The operations of the network on rows: vectors of a width that follows from the operation, one a token.

    Names are those of the weights (dgemma_trt/weights.py). Values have the session's dtype unless said otherwise; norms,
    the router and the head compute in float32.
    """

    def embed(self, group: Group) -> Rows:
        """Rows of the embedding table for a group's token ids, times sqrt(hidden) rounded to the session's dtype."""
        ...

    def soft_embeddings(self) -> Rows:
        """The canvas rows' soft embeddings from the previous denoising step; zeros at the first."""
        ...

    def join(self, context: Rows, canvas: Rows) -> Rows:
        """Both groups as one, context first."""
        ...

    def canvas_only(self, x: Rows) -> Rows:
        """The canvas group of joined rows."""
        ...

    def add(self, x: Rows, y: Rows) -> Rows:
        """x + y."""
        ...

    def scale_by_group(self, x: Rows, name: str) -> Rows:
        """x times the scalar `name`.encoder on context rows, `name`.decoder on canvas rows."""
        ...

    def rms_norm(self, x: Rows, name: str | None, head_dim: int | None = None) -> Rows:
        """x * (mean(x^2) + eps)^-1/2 * weight over each row, or over each head of `head_dim`; None: without weight."""
        ...

    def linear(self, x: Rows, name: str) -> Rows:
        """x @ weight^T, in the precision the weight is stored in."""
        ...

    def gelu_gate(self, gate: Rows, up: Rows) -> Rows:
        """gelu_tanh(gate) * up."""
        ...

    def rotary(self, x: Rows, layer: LayerConfig) -> Rows:
        """Rotates each head by its row's position: element i pairs with i + head_dim / 2."""
        ...

    def mixed_mask_attention(self, q: Rows, k: Rows, v: Rows, layer: LayerConfig) -> Rows:
        """softmax(q k^T) v per head, no score scale, over cached, context and canvas keys as the mixed mask allows.

        Context rows see cached and context keys up to their own position (sliding layers: fewer than `window` back).
        Canvas rows see every canvas key and the context; on sliding layers the last `window` - 1 tokens of it. k and v of the
        context rows are kept.
        """
        ...

    def router_scores(self, x: Rows, name: str) -> Rows:
        """(x without its root mean square) * `name`.scale * hidden^-1/2 @ `name`.proj^T, in float32."""
        ...

    def choose_experts(self, scores: Rows, name: str) -> Routing:
        """The top experts by softmax(scores) and their weights: renormalised to sum 1, times `name`.per_expert_scale."""
        ...

    def experts(self, x: Rows, routing: Routing, name: str) -> Rows:
        """Sum over a row's experts of weight * down(gelu_tanh(gate(x)) * up(x))."""
        ...

    def vocabulary_head(self, x: Rows) -> Read:
        """What a denoising step reads off: logits = softcap * tanh(x @ embedding^T / softcap) and all that follows."""
        ...


def network(ops: Ops[Rows, Routing, Read], config: ModelConfig) -> Read:
    """One pass over whatever rows `ops` holds."""
    x = ops.join(ops.embed("context"), _self_condition(ops, ops.embed("canvas"), ops.soft_embeddings()))
    for layer in config.layers:
        x = _layer(ops, layer, x)
    return ops.vocabulary_head(ops.rms_norm(ops.canvas_only(x), "norm"))


def _self_condition(ops: Ops[Rows, Routing, Read], embedded: Rows, soft: Rows) -> Rows:
    signal = _gated_mlp(ops, ops.rms_norm(soft, "self_conditioning.pre_norm"), "self_conditioning")
    return ops.rms_norm(ops.add(embedded, signal), None)


def _layer(ops: Ops[Rows, Routing, Read], layer: LayerConfig, x: Rows) -> Rows:
    name = layer.name
    attended = _attention(ops, layer, ops.rms_norm(x, f"{name}.input_layernorm"))
    x = ops.add(x, ops.rms_norm(attended, f"{name}.post_attention_layernorm"))

    dense = _gated_mlp(ops, ops.rms_norm(x, f"{name}.pre_feedforward_layernorm"), f"{name}.mlp")
    routing = ops.choose_experts(ops.router_scores(x, f"{name}.router"), f"{name}.router")
    sparse = ops.experts(ops.rms_norm(x, f"{name}.pre_feedforward_layernorm_2"), routing, f"{name}.experts")
    both = ops.add(
        ops.rms_norm(dense, f"{name}.post_feedforward_layernorm_1"),
        ops.rms_norm(sparse, f"{name}.post_feedforward_layernorm_2"),
    )
    x = ops.add(x, ops.rms_norm(both, f"{name}.post_feedforward_layernorm"))
    return ops.scale_by_group(x, f"{name}.layer_scalar")


def _attention(ops: Ops[Rows, Routing, Read], layer: LayerConfig, x: Rows) -> Rows:
    name = f"{layer.name}.self_attn"
    q = ops.rms_norm(ops.linear(x, f"{name}.q_proj"), f"{name}.q_norm", layer.head_dim)
    projected = ops.linear(x, f"{name}.k_proj")
    k = ops.rms_norm(projected, f"{name}.k_norm", layer.head_dim)
    v = ops.rms_norm(ops.linear(x, f"{name}.v_proj") if layer.sliding else projected, None, layer.head_dim)
    attended = ops.mixed_mask_attention(ops.rotary(q, layer), ops.rotary(k, layer), v, layer)
    return ops.linear(attended, f"{name}.o_proj")


def _gated_mlp(ops: Ops[Rows, Routing, Read], x: Rows, name: str) -> Rows:
    hidden = ops.gelu_gate(ops.linear(x, f"{name}.gate_proj"), ops.linear(x, f"{name}.up_proj"))
    return ops.linear(hidden, f"{name}.down_proj")
