"""Attention of the mixed network: both groups' rows against the caches, each other's new keys, and themselves."""

from __future__ import annotations

from dgemma_trt.build.layers import Layers, Node
from dgemma_trt.config import LayerConfig

UNSEEN = -2
"""Position of keys that no row sees. Padding rows have position -1 and see the padding keys of their own chunk or canvas, so
that their softmax is over something; empty cache slots and padding from elsewhere are hidden from them too."""


class Groups:
    """The rows of a pass: context [Bc, Tc] before canvases [B, T], flattened to [Bc * Tc + B * T, width]."""

    def __init__(self, layers: Layers, context_positions: Node, canvas_positions: Node) -> None:
        self._layers = layers
        self.context_positions, self.canvas_positions = context_positions, canvas_positions
        self.context_shape = [layers.size(context_positions, 0), layers.size(context_positions, 1)]
        self.canvas_shape = [layers.size(canvas_positions, 0), layers.size(canvas_positions, 1)]
        flat = [layers.reshape(positions, [-1, 1]) for positions in (context_positions, canvas_positions)]
        self._context_rows, self._canvas_rows = (layers.size(positions, 0) for positions in flat)
        self.positions = self.join(*flat)
        """int32 [rows, 1]."""
        index = layers.count_up(layers.size(self.positions, 0))
        first_canvas_row = layers.cast(self._context_rows, "int32")
        self.is_context = layers.reshape(layers.elementwise("LESS", index, first_canvas_row), [-1, 1])
        """bool [rows, 1]."""

    def join(self, context: Node, canvas: Node) -> Node:
        """Both groups' rows as one."""
        return self._layers.concatenate([context, canvas], 0)

    def context(self, x: Node) -> Node:
        """The context rows of x [rows, width]."""
        return self._layers.slice(x, [0, 0], [self._context_rows, x.shape[1]])

    def canvas(self, x: Node) -> Node:
        """The canvas rows of x [rows, width]."""
        return self._layers.slice(x, [self._context_rows, 0], [self._canvas_rows, x.shape[1]])


class MixedMaskAttention:
    """Attention with the mixed mask, which follows from positions; a mask is made once for a layer type and group.

    cached_positions: positions of the cached keys, int32 [B, C], by `LayerConfig.sliding`. context_slot: int32 [Bc], the row of
    the batch that a context row serves, -1 for none. per_token: the window rule for canvas rows.
    """

    def __init__(
        self,
        layers: Layers,
        groups: Groups,
        context_slot: Node,
        cached_positions: dict[bool, Node],
        window: int,
        per_token: bool,
    ) -> None:
        self._layers, self._groups = layers, groups
        self._window, self._per_token = window, per_token
        self._one_more = layers.elementwise("SUM", groups.context_shape[0], 1)
        self._serving = self._invert(context_slot)
        # Context rows without a slot read the cache of slot 0, unseen.
        self._slots = layers.elementwise("MAX", context_slot, 0)
        with layers.scope("mask"):
            self._masks = {
                sliding: (self._context_mask(positions, sliding), self._canvas_mask(positions, sliding))
                for sliding, positions in cached_positions.items()
            }

    def _invert(self, context_slot: Node) -> Node:
        """int32 [B]: 1 + the context row that serves a row of the batch, 0 where there is none.

        The new context keys reach the canvases by a gather through this map from the context rows with a dummy row in front.
        That needs neither control flow nor special cases: rows of the batch without context, and passes without any, read
        the dummy.
        """
        layers = self._layers
        slots = layers.reshape(layers.slice(context_slot, [-1], [self._one_more], fill=-1), [1, -1])
        rows = layers.reshape(layers.count_up(self._groups.canvas_shape[0]), [-1, 1])
        index = layers.reshape(layers.count_up(self._one_more), [1, -1])
        return layers.reduce("MAX", layers.select(layers.elementwise("EQUAL", slots, rows), index, 0), 1, keep=False)

    def _for_canvases(self, x: Node, fill: int) -> Node:
        """[B, n, Tc, d]: what x [Bc, n, Tc, d] holds for each row of the batch, `fill` where there is no context."""
        size = [self._one_more, x.shape[1], self._groups.context_shape[1], x.shape[3]]
        return self._layers.gather(self._layers.slice(x, [-1, 0, 0, 0], size, fill=fill), self._serving, 0)

    # Masks, bool [batch, 1, queries, keys]

    def _context_mask(self, cached: Node, sliding: bool) -> Node:
        layers, own = self._layers, self._groups.context_positions
        queries = self._queries(own)
        keys = self._keys(self._hide_empty(layers.gather(cached, self._slots, 0)), own)
        seen = self._both(self._filled(keys), layers.unary("NOT", layers.elementwise("GREATER", keys, queries)))
        if sliding:
            seen = self._both(seen, self._closer_than_window(queries, keys))
        return self._or_padding(seen, queries, keys)

    def _canvas_mask(self, cached: Node, sliding: bool) -> Node:
        layers, own = self._layers, self._groups.canvas_positions
        queries = self._queries(own)
        new = layers.squeeze(self._for_canvases(self._queries(self._groups.context_positions), fill=UNSEEN), [1, 3])
        keys = self._keys(self._hide_empty(cached), self._hide_empty(new), own)
        seen = self._filled(keys)
        if sliding and self._per_token:
            seen = self._both(seen, self._closer_than_window(queries, keys))
            seen = self._both(seen, self._closer_than_window(keys, queries))
        elif sliding:
            # A canvas of length 0 has no first position.
            first = layers.slice(own, [0, 0], [self._groups.canvas_shape[0], 1], fill=UNSEEN)
            seen = self._both(seen, self._closer_than_window(self._queries(first), keys))
        return self._or_padding(seen, queries, keys)

    def _queries(self, positions: Node) -> Node:
        """[batch, n] as [batch, 1, n, 1]."""
        return self._layers.unsqueeze(positions, [1, 3])

    def _keys(self, *positions: Node) -> Node:
        """[batch, m], after each other, as [batch, 1, 1, m]."""
        return self._layers.unsqueeze(self._layers.concatenate(positions, 1), [1, 2])

    def _hide_empty(self, positions: Node) -> Node:
        return self._layers.select(self._layers.elementwise("LESS", positions, 0), UNSEEN, positions)

    def _filled(self, keys: Node) -> Node:
        return self._layers.elementwise("GREATER", keys, -1)

    def _closer_than_window(self, later: Node, earlier: Node) -> Node:
        distance = self._layers.elementwise("SUB", later, earlier)
        return self._layers.elementwise("LESS", distance, self._window)

    def _both(self, x: Node, y: Node) -> Node:
        return self._layers.elementwise("AND", x, y)

    def _or_padding(self, seen: Node, queries: Node, keys: Node) -> Node:
        # Of equal positions, those of real rows are a row and itself, which sees itself anyway.
        return self._layers.elementwise("OR", seen, self._layers.elementwise("EQUAL", keys, queries))

    # Attention

    def attend(self, q: Node, k: Node, v: Node, k_cache: Node, v_cache: Node, layer: LayerConfig) -> tuple[Node, Node, Node]:
        """Rows [rows, heads * d] of what q, k, v (same layout) attend to, and the context's new keys and values.

        Caches: [B, kv_heads, C, d]; new keys and values: [Bc, kv_heads, Tc, d].
        """
        context_mask, canvas_mask = self._masks[layer.sliding]
        context, canvas = self._groups.context, self._groups.canvas
        k_new, v_new = (self._heads(context(x), self._groups.context_shape, layer) for x in (k, v))
        attended = self._attend(
            self._heads(context(q), self._groups.context_shape, layer),
            [self._layers.gather(k_cache, self._slots, 0), k_new],
            [self._layers.gather(v_cache, self._slots, 0), v_new],
            context_mask,
        )
        denoised = self._attend(
            self._heads(canvas(q), self._groups.canvas_shape, layer),
            [k_cache, self._for_canvases(k_new, fill=0), self._heads(canvas(k), self._groups.canvas_shape, layer)],
            [v_cache, self._for_canvases(v_new, fill=0), self._heads(canvas(v), self._groups.canvas_shape, layer)],
            canvas_mask,
        )
        return self._groups.join(attended, denoised), k_new, v_new

    def _heads(self, rows: Node, shape: list[Node], layer: LayerConfig) -> Node:
        """[batch * n, heads * d] as [batch, heads, n, d]."""
        return self._layers.reshape(rows, [*shape, rows.shape[1] // layer.head_dim, layer.head_dim], after=(0, 2, 1, 3))

    def _attend(self, q: Node, keys: list[Node], values: list[Node], mask: Node) -> Node:
        k, v = self._layers.concatenate(keys, 2), self._layers.concatenate(values, 2)
        out = self._layers.attention(q, k, v, mask)
        return self._layers.reshape(out, [-1, q.shape[1] * q.shape[3]], before=(0, 2, 1, 3))
