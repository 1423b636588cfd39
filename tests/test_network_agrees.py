"""What TensorRT is given computes what the checkpoint means: the oracle's outputs against the host session's.

The network is emitted in float32 for this, so that what is left is the order of sums: relative distances of 1e-6 were seen on
random models, where one wrong rule gives 0.01 and more. In bf16, which engines use, the same models are chaotic (roundings
choose other experts), so that the emitter's bf16 is checked for being the same layers with another type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import reference
import tensorrt_rtx as trt
import torch
from random_weights import RandomWeights, tiny_config
from torch import Tensor

from dgemma_trt.build.network import Emitted, NetworkOptions, emit
from dgemma_trt.build.oracle import execute
from dgemma_trt.checkpoint import Checkpoint
from dgemma_trt.runtime.host import HostSession
from dgemma_trt.runtime.session import CanvasRows, ContextRows, Limits, Rows
from dgemma_trt.weights import Precision, Weights

CANVAS, WINDOW, VOCAB = 8, reference.TINY["sliding_window"], reference.TINY["vocab_size"]
OPTIONS = NetworkOptions(
    max_batch=4, max_context=128, prefill_chunk=32, canvas_length=CANVAS, debug_logits=True, dtype="float32"
)
LIMITS = Limits(max_batch=4, max_context=128, prefill_chunk=32, canvas_length=CANVAS)
BOUND = 1e-4
ROUNDED_BOUND = 1e-2
"""For quantized matmuls: a difference of 1e-7 can put an input on the other side of a rounding tie (seen: 0.003, once)."""


def tokens(seed: int, count: int) -> Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def canvas_rows(slot: int, start: int, seed: int, soft: Tensor | None = None, count: int = CANVAS) -> CanvasRows:
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    return CanvasRows(slot, start, tokens(seed, count), soft, temperature=0.5 + 0.1 * slot, uniform=uniform)


def weight_inputs(weights: Weights, emitted: Emitted) -> dict[str, Tensor]:
    found = {}
    for name in emitted.weight_inputs:
        base, _, part = name.rpartition(".")
        found[name] = getattr(weights.linear(base), part) if part in ("weight", "weight_scale") else weights.tensor(name)
    return found


def pack(session: HostSession, context: Sequence[ContextRows], canvases: Sequence[CanvasRows]) -> dict[str, Tensor]:
    """The network's inputs for a pass, before the host session runs it: rows padded, caches in any order with spare slots."""
    config = session.config
    both: list[Rows] = [*context, *canvases]
    batch = 1 + max((rows.slot for rows in both), default=0)
    longest = max((len(rows.ids) for rows in context), default=0) + (2 if context else 0)
    width = max((len(rows.ids) for rows in canvases), default=0)
    inputs = {
        "canvas_ids": torch.zeros(batch, width, dtype=torch.int32),
        "canvas_positions": torch.full((batch, width), -1, dtype=torch.int32),
        "soft_embeddings": torch.zeros(batch, width, config.hidden_size),
        "temperature": torch.ones(batch),
        "uniform": torch.zeros(batch, width),
        "context_ids": torch.zeros(len(context), longest, dtype=torch.int32),
        "context_positions": torch.full((len(context), longest), -1, dtype=torch.int32),
        "context_slot": torch.tensor([rows.slot for rows in context], dtype=torch.int32),
    }
    for index, chunk in enumerate(context):
        inputs["context_ids"][index, : len(chunk.ids)] = chunk.ids
        inputs["context_positions"][index, : len(chunk.ids)] = torch.arange(chunk.start, chunk.start + len(chunk.ids))
    for canvas in canvases:
        count = len(canvas.ids)
        inputs["canvas_ids"][canvas.slot, :count] = canvas.ids
        inputs["canvas_positions"][canvas.slot, :count] = torch.arange(canvas.start, canvas.start + count)
        inputs["temperature"][canvas.slot] = canvas.temperature
        inputs["uniform"][canvas.slot, :count] = canvas.uniform
        if canvas.soft_embeddings is not None:
            inputs["soft_embeddings"][canvas.slot, :count] = canvas.soft_embeddings
    lengths = [session.cache(slot).length for slot in range(batch)]
    capacity = {True: WINDOW, False: max(lengths) + 3}
    order = {
        sliding: [torch.randperm(capacity[sliding], generator=torch.Generator().manual_seed(s)) for s in range(batch)]
        for sliding in (True, False)
    }
    for sliding in (True, False):
        positions = torch.full((batch, capacity[sliding]), -1, dtype=torch.int32)
        for slot, length in enumerate(lengths):
            held = min(length, WINDOW) if sliding else length
            positions[slot, order[sliding][slot][:held]] = torch.arange(length - held, length, dtype=torch.int32)
        inputs["sliding_positions" if sliding else "full_positions"] = positions
    for layer in config.layers:
        for kind, which in (("k_cache", 0), ("v_cache", 1)):
            # Spare slots hold rubbish here: the mask must keep it out.
            packed = torch.full((batch, layer.kv_heads, capacity[layer.sliding], layer.head_dim), 77.0)
            for slot in range(batch):
                entry = session.cache(slot).entry(layer)
                if entry is not None:
                    packed[slot][:, order[layer.sliding][slot][: entry[which].shape[1]]] = entry[which]
            inputs[f"{layer.name}.{kind}"] = packed
    return inputs


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def compare(
    weights: Weights, session: HostSession, emitted: Emitted, context: list[ContextRows], canvases: list[CanvasRows]
) -> float:
    """Runs a pass both ways and returns the largest relative distance of any output; token ids must agree with logits."""
    inputs = pack(session, context, canvases) | weight_inputs(weights, emitted)
    outputs = execute(emitted.network, trt, inputs, emitted.constants)
    for name, tensor in outputs.items():
        assert tensor.float().isfinite().all(), name
    before = {rows.slot: session.cache(rows.slot).length for rows in context}
    logits = session.logits(context, canvases)
    far = [0.0]
    for rows, expected in zip(canvases, logits, strict=True):
        own = {name: outputs[name][rows.slot, : len(rows.ids)] for name in ("logits", "best_ids", "entropy", "best_logprob")}
        far.append(distance(own["logits"], expected))
        z = own["logits"] / rows.temperature
        assert torch.equal(own["best_ids"].long(), z.argmax(-1))
        categorical = torch.distributions.Categorical(logits=z)
        assert (own["entropy"] - categorical.entropy()).abs().max() < 1e-3
        assert (own["best_logprob"] - z.log_softmax(-1).max(-1).values).abs().max() < 1e-3
        soft = z.softmax(-1) @ weights.tensor("embed_tokens").float() * weights.config.hidden_size**0.5
        assert distance(outputs["next_soft_embeddings"][rows.slot, : len(rows.ids)], soft) < BOUND
        running = z.double().softmax(-1).cumsum(-1)
        drawn = outputs["sampled_ids"][rows.slot, : len(rows.ids)].long()
        above = running.gather(-1, drawn[:, None])[:, 0]
        below = above - z.double().softmax(-1).gather(-1, drawn[:, None])[:, 0]
        assert ((below - 1e-4 <= rows.uniform) & (rows.uniform <= above + 1e-4)).all()
    for index, chunk in enumerate(context):
        for layer in session.config.layers:
            keys, values = session.cache(chunk.slot).entry(layer)  # type: ignore[misc]
            kept = min(len(chunk.ids), keys.shape[1])
            assert session.cache(chunk.slot).length == before[chunk.slot] + len(chunk.ids)
            for name, cached in (("k_new", keys), ("v_new", values)):
                new = outputs[f"{layer.name}.{name}"][index][:, len(chunk.ids) - kept : len(chunk.ids)]
                far.append(distance(new, cached[:, -kept:]))
    return max(far)


PASSES: list[tuple[str, Any]] = [
    ("prefill only", lambda soft: ([ContextRows(0, 0, tokens(1, 20))], [])),
    ("chunk and first step", lambda soft: ([ContextRows(0, 20, tokens(2, 9))], [canvas_rows(0, 29, 3)])),
    ("later step", lambda soft: ([], [canvas_rows(0, 29, 4, soft)])),
    ("commit with denoising", lambda soft: ([ContextRows(0, 29, tokens(5, 8))], [canvas_rows(0, 37, 6)])),
    (
        "mixed phases",
        lambda soft: (
            [ContextRows(2, 0, tokens(7, 30)), ContextRows(1, 0, tokens(8, 3))],
            [canvas_rows(0, 37, 9, soft), canvas_rows(1, 3, 10)],
        ),
    ),
    ("a short canvas", lambda soft: ([], [canvas_rows(0, 37, 11), canvas_rows(2, 30, 12, count=5)])),
]


def largest_distances(weights: Weights, emitted: Emitted) -> dict[str, float]:
    session = HostSession(weights, LIMITS)
    soft = torch.randn(CANVAS, weights.config.hidden_size, generator=torch.Generator().manual_seed(0))
    return {name: compare(weights, session, emitted, *rows(soft)) for name, rows in PASSES}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("random")
    return Checkpoint(reference.save(reference.random_model(11), folder))


def test_network_in_every_phase(checkpoint: Checkpoint) -> None:
    distances = largest_distances(checkpoint, emit(checkpoint, OPTIONS, trt))
    assert max(distances.values()) < BOUND, distances


def test_per_token_window_rule(checkpoint: Checkpoint) -> None:
    emitted = emit(checkpoint, replace(OPTIONS, window_rule="per-token"), trt)
    session = HostSession(checkpoint, LIMITS, window_rule="per-token")
    assert compare(checkpoint, session, emitted, [ContextRows(0, 0, tokens(1, 30))], [canvas_rows(0, 30, 2)]) < BOUND
    other = HostSession(checkpoint, LIMITS)
    assert compare(checkpoint, other, emitted, [ContextRows(0, 0, tokens(1, 30))], [canvas_rows(0, 30, 2)]) > BOUND


@pytest.mark.parametrize("precision", list(Precision))
def test_every_precision_in_every_phase(precision: Precision) -> None:
    weights = RandomWeights(tiny_config(), precision)
    distances = largest_distances(weights, emit(weights, OPTIONS, trt))
    assert max(distances.values()) < (BOUND if precision is Precision.BF16 else ROUNDED_BOUND), distances
