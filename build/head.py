"""The vocabulary head inside the engine: from logits to what a denoising step needs of them.

The logits, one float32 a canvas row and word, never leave the engine unless asked for. Semantics: runtime/vocabulary.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from dgemma_trt.build.layers import Layers, Node

BLOCK = 512
"""Words a block of the two-level sampling."""


@dataclass(frozen=True)
class Reading:
    """What rows of z, the logits divided by the temperature, say.

    best_ids, sampled_ids: int32 [rows]. entropy (nats), best_logprob: float32 [rows]. probabilities: softmax(z), float32
    [rows, V]. shifted: z - max, float32 [rows, V]; log_total: float32 [rows, 1]; log softmax(z) = shifted - log_total.
    """

    best_ids: Node
    sampled_ids: Node
    entropy: Node
    best_logprob: Node
    probabilities: Node
    shifted: Node
    log_total: Node


def read_vocabulary(layers: Layers, z: Node, uniform: Node) -> Reading:
    """Reads z, float32 [rows, V], with one draw a row: uniform, float32 [rows, 1]."""
    shifted = layers.elementwise("SUB", z, layers.reduce("MAX", z, 1))
    p = layers.unary("EXP", shifted)
    blocks, sums = _blocks(layers, p)
    total = layers.reduce("SUM", sums, 1)
    log_total = layers.unary("LOG", total)
    expected = layers.elementwise("DIV", layers.reduce("SUM", layers.elementwise("PROD", p, shifted), 1), total)
    entropy = layers.elementwise("MAX", layers.elementwise("SUB", log_total, expected), 0.0)
    # The first of equal maxima, which a top-k layer does not promise.
    best = layers.first_true(layers.elementwise("EQUAL", shifted, 0.0))
    return Reading(
        best_ids=layers.squeeze(best, [1]),
        sampled_ids=layers.squeeze(_sample(layers, blocks, sums, layers.elementwise("PROD", uniform, total)), [1]),
        entropy=layers.squeeze(entropy, [1]),
        best_logprob=layers.squeeze(layers.unary("NEG", log_total), [1]),
        probabilities=layers.elementwise("DIV", p, total),
        shifted=shifted,
        log_total=log_total,
    )


def _blocks(layers: Layers, p: Node) -> tuple[Node, Node]:
    """p [rows, V] in blocks [rows, n, 512], the last filled up with zeros, and the sum of each, [rows, n]."""
    count = -(-p.shape[1] // BLOCK)
    if p.shape[1] % BLOCK:
        p = layers.slice(p, [0, 0], [layers.size(p, 0), count * BLOCK], fill=0.0)
    blocks = layers.reshape(p, [-1, count, BLOCK])
    return blocks, layers.reduce("SUM", blocks, 2, keep=False)


def _sample(layers: Layers, blocks: Node, sums: Node, target: Node) -> Node:
    """int32 [rows, 1]: the first word at which the running sum exceeds `target`, found by block and then inside it.

    Where rounding finds none, the last with p > 0: a sum over a block and its running sum may differ in the last bits.
    """
    running = layers.running_sum(sums, 1)
    block = _first_beyond(layers, running, target, sums)
    indices = layers.indices(sums.shape[1])
    before = layers.select(layers.elementwise("EQUAL", indices, layers.elementwise("SUB", block, 1)), running, 0.0)
    inside = layers.squeeze(layers.gather(blocks, block, 1, batched=True), [1])
    running_inside = layers.elementwise("SUM", layers.running_sum(inside, 1), layers.reduce("SUM", before, 1))
    word = _first_beyond(layers, running_inside, target, inside)
    return layers.elementwise("SUM", layers.elementwise("PROD", block, BLOCK), word)


def _first_beyond(layers: Layers, running: Node, target: Node, p: Node) -> Node:
    """int32 [rows, 1]: the first index where `running` exceeds `target` and p > 0, else the last where p > 0."""
    possible = layers.elementwise("GREATER", p, 0.0)
    beyond = layers.elementwise("AND", layers.elementwise("GREATER", running, target), possible)
    last = layers.reduce("MAX", layers.select(possible, layers.indices(p.shape[1]), 0), 1)
    return layers.elementwise("MIN", layers.first_true(beyond), last)
