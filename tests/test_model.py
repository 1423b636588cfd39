"""The network on the host session against transformers' DiffusionGemma, in float32 on random models.

Tolerance 1e-4 on softcapped logits whose largest is above 3: both sides compute in float32 and order their sums differently,
which was seen to move logits by up to 3e-5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

from dgemma_trt.checkpoint import Checkpoint
from dgemma_trt.config import WindowRule
from dgemma_trt.runtime.host import HostSession
from dgemma_trt.runtime.session import CanvasRows, ContextRows, Limits

TOLERANCE = 1e-4
WINDOW = reference.TINY["sliding_window"]
VOCAB = reference.TINY["vocab_size"]


def tokens(seed: int, count: int) -> Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def open_session(model: DiffusionGemmaForBlockDiffusion, folder: Path, window_rule: WindowRule = "reference") -> HostSession:
    checkpoint = Checkpoint(reference.save(model, folder))
    limits = Limits(max_batch=8, max_context=512, prefill_chunk=512, canvas_length=checkpoint.config.canvas_length)
    return HostSession(checkpoint, limits, window_rule=window_rule)


def canvas_rows(slot: int, start: int, ids: Tensor, soft: Tensor | None = None) -> CanvasRows:
    return CanvasRows(slot, start, ids, soft, temperature=1.0, uniform=torch.zeros(len(ids)))


def soft_embeddings(model: DiffusionGemmaForBlockDiffusion, processed: Tensor) -> Tensor:
    table = model.model.decoder.embed_tokens.weight.detach()
    return processed.softmax(-1) @ table * table.shape[1] ** 0.5


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 3, "logits this small prove nothing"
    assert (found - expected).abs().max() < TOLERANCE


@pytest.fixture(scope="module")
def model() -> DiffusionGemmaForBlockDiffusion:
    return reference.random_model()


@pytest.fixture(scope="module")
def session(model: DiffusionGemmaForBlockDiffusion, tmp_path_factory: pytest.TempPathFactory) -> HostSession:
    return open_session(model, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def fresh_slots(request: pytest.FixtureRequest) -> None:
    if "session" in request.fixturenames:
        for slot in range(8):
            request.getfixturevalue("session").reset(slot)


@pytest.mark.parametrize("length", [1, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5])
def test_first_step_after_prompts_around_the_window(
    model: DiffusionGemmaForBlockDiffusion, session: HostSession, length: int
) -> None:
    prompt, canvas = tokens(1, length), tokens(2, 8)
    (found,) = session.logits([ContextRows(0, 0, prompt)], [canvas_rows(0, length, canvas)])
    assert_close(found, reference.logits(model, [prompt.tolist()], canvas))


def test_context_in_chunks_equals_context_at_once(model: DiffusionGemmaForBlockDiffusion, session: HostSession) -> None:
    prompt, canvas = tokens(1, 45), tokens(2, 8)
    for start, end in ((0, 20), (20, 21), (21, 41)):
        session.logits([ContextRows(0, start, prompt[start:end])], [])
    (found,) = session.logits([ContextRows(0, 41, prompt[41:])], [canvas_rows(0, 45, canvas)])
    assert_close(found, reference.logits(model, [prompt.tolist()], canvas))


def test_later_steps_see_the_soft_embeddings(model: DiffusionGemmaForBlockDiffusion, session: HostSession) -> None:
    prompt, canvas = tokens(1, 21), tokens(2, 8)
    first = reference.logits(model, [prompt.tolist()], canvas)
    processed = first / 0.7
    (found,) = session.logits([ContextRows(0, 0, prompt)], [canvas_rows(0, 21, canvas, soft_embeddings(model, processed))])
    expected = reference.logits(model, [prompt.tolist()], canvas, processed)
    assert (expected - first).abs().max() > 0.1, "the soft embeddings should matter"
    assert_close(found, expected)


def test_soft_embeddings_of_a_step_are_those_of_the_reference(
    model: DiffusionGemmaForBlockDiffusion, session: HostSession
) -> None:
    prompt, canvas = tokens(1, 21), tokens(2, 8)
    rows = CanvasRows(0, 21, canvas, None, temperature=0.7, uniform=torch.rand(8))
    (result,) = session.run([ContextRows(0, 0, prompt)], [rows])
    expected = soft_embeddings(model, reference.logits(model, [prompt.tolist()], canvas) / 0.7)
    assert (result.soft_embeddings - expected).abs().max() < TOLERANCE


def test_several_canvases_committed_with_the_next_first_step(
    model: DiffusionGemmaForBlockDiffusion, session: HostSession
) -> None:
    prompt = tokens(1, 13)
    canvases = [tokens(10 + i, 8) for i in range(5)]
    context, start = prompt, 0
    for index, canvas in enumerate(canvases):
        after = start + len(context)
        (found,) = session.logits([ContextRows(0, start, context)], [canvas_rows(0, after, canvas)])
        pieces = [prompt.tolist(), *(c.tolist() for c in canvases[:index])]
        assert_close(found, reference.logits(model, pieces, canvas))
        context, start = canvas, after


def test_unequal_prompts_in_one_pass_equal_each_alone_and_the_padded_batch(
    model: DiffusionGemmaForBlockDiffusion, session: HostSession
) -> None:
    prompts = [tokens(i, length) for i, length in enumerate((3, 40, 17, 16))]
    canvases = [tokens(20 + i, 8) for i in range(4)]
    context = [ContextRows(slot, 0, prompt) for slot, prompt in enumerate(prompts)]
    rows = [canvas_rows(slot, len(prompts[slot]), canvas) for slot, canvas in enumerate(canvases)]
    together = session.logits(context, rows)
    padded = reference.padded_logits(model, [prompt.tolist() for prompt in prompts], torch.stack(canvases))
    for slot, found in enumerate(together):
        session.reset(slot)
        (alone,) = session.logits([context[slot]], [rows[slot]])
        assert torch.equal(found, alone)
        assert_close(found, reference.logits(model, [prompts[slot].tolist()], canvases[slot]))
        assert_close(found, padded[slot])


def test_both_config_spellings_give_the_same_model(model: DiffusionGemmaForBlockDiffusion, tmp_path: Path) -> None:
    new = Checkpoint(reference.save(model, tmp_path)).config
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["text_config"].pop("per_layer_config")
    config["text_config"] |= {"global_head_dim": 40, "num_global_key_value_heads": 1}
    path.write_text(json.dumps(config))
    assert Checkpoint(tmp_path).config == new


@pytest.mark.parametrize(
    "text",
    [
        {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 4},
        {"num_global_key_value_heads": 4, "num_key_value_heads": 4},
        {"top_k_experts": 6},
    ],
    ids=["last layers all full", "no shared KV heads", "every expert chosen"],
)
def test_other_geometries(text: dict[str, Any], tmp_path: Path) -> None:
    model = reference.random_model(3, **text)
    prompt, canvas = tokens(1, 29), tokens(2, 8)
    (found,) = open_session(model, tmp_path).logits([ContextRows(0, 0, prompt)], [canvas_rows(0, 29, canvas)])
    assert_close(found, reference.logits(model, [prompt.tolist()], canvas))


def test_a_full_canvas_of_equal_tokens(tmp_path: Path) -> None:
    model = reference.random_model(4, canvas_length=256)
    prompt, canvas = tokens(1, 9), torch.full((256,), 7)
    (found,) = open_session(model, tmp_path).logits([ContextRows(0, 0, prompt)], [canvas_rows(0, 9, canvas)])
    assert_close(found, reference.logits(model, [prompt.tolist()], canvas))


def test_the_router_takes_the_raw_residual(tmp_path: Path) -> None:
    model = reference.random_model(5)
    for layers in (model.model.encoder.language_model.layers, model.model.decoder.layers):
        for layer in layers:
            layer.pre_feedforward_layernorm_2.weight.data.copy_(torch.linspace(-9, 30, 64))
    prompt, canvas = tokens(1, 9), tokens(2, 8)
    (found,) = open_session(model, tmp_path).logits([ContextRows(0, 0, prompt)], [canvas_rows(0, 9, canvas)])
    assert_close(found, reference.logits(model, [prompt.tolist()], canvas))


@pytest.mark.parametrize("canvas_length", [8, 24], ids=["canvas within the window", "canvas longer than the window"])
@pytest.mark.parametrize("length", [9, 40])
def test_per_token_window_equals_a_mask_written_out(canvas_length: int, length: int, tmp_path: Path) -> None:
    model = reference.random_model(6, canvas_length=canvas_length)
    prompt, canvas = tokens(1, length), tokens(2, canvas_length)
    cached = min(length, WINDOW - 1)
    mask = torch.zeros(canvas_length, cached + canvas_length, dtype=torch.bool)
    for row in range(canvas_length):
        for column in range(cached + canvas_length):
            key = length - cached + column
            mask[row, column] = abs(length + row - key) < WINDOW
    (found,) = open_session(model, tmp_path, "per-token").logits([ContextRows(0, 0, prompt)], [canvas_rows(0, length, canvas)])
    assert_close(found, reference.logits(model, [prompt.tolist()], canvas, sliding_mask=mask))


def test_a_canvas_longer_than_the_window_sees_all_of_itself(tmp_path: Path) -> None:
    model = reference.random_model(7, canvas_length=24)
    prompt, canvas = tokens(1, 40), tokens(2, 24)
    (found,) = open_session(model, tmp_path).logits([ContextRows(0, 0, prompt)], [canvas_rows(0, 40, canvas)])
    assert_close(found, reference.logits(model, [prompt.tolist()], canvas))


@pytest.mark.parametrize(("distance", "matters"), [(WINDOW, False), (WINDOW - 1, True)])
def test_a_sliding_layer_sees_one_key_less_than_the_window(
    model: DiffusionGemmaForBlockDiffusion, session: HostSession, distance: int, matters: bool
) -> None:
    prompt, canvas = tokens(1, 40), tokens(2, 8)
    session.logits([ContextRows(0, 0, prompt)], [])
    (before,) = session.logits([], [canvas_rows(0, 40, canvas)])
    keys, values = session.cache(0).entry(session.config.layers[0])  # type: ignore[misc]
    keys[:, -distance] = 5.0
    values[:, -distance] = 5.0
    (after,) = session.logits([], [canvas_rows(0, 40, canvas)])
    assert torch.equal(before, after) is not matters


def test_other_slots_are_never_seen(model: DiffusionGemmaForBlockDiffusion, session: HostSession) -> None:
    prompt, canvas = tokens(1, 20), tokens(2, 8)
    session.logits([ContextRows(1, 0, tokens(3, 30))], [])
    for layer in session.config.layers:
        for poisoned in session.cache(1).entry(layer):  # type: ignore[union-attr]
            poisoned.fill_(float("nan"))
    rows = [canvas_rows(0, 20, canvas), canvas_rows(1, 30, canvas)]
    found, _ = session.logits([ContextRows(0, 0, prompt)], rows)
    assert_close(found, reference.logits(model, [prompt.tolist()], canvas))


def test_bf16_stays_near_float32(model: DiffusionGemmaForBlockDiffusion, session: HostSession, tmp_path: Path) -> None:
    checkpoint = Checkpoint(reference.save(model, tmp_path))
    rounded = HostSession(checkpoint, session.limits, dtype=torch.bfloat16)
    prompt, canvas = tokens(1, 20), tokens(2, 8)
    arguments = [ContextRows(0, 0, prompt)], [canvas_rows(0, 20, canvas)]
    (exact,), (found,) = session.logits(*arguments), rounded.logits(*arguments)
    relative = ((found - exact).norm() / exact.norm()).item()
    assert 1e-4 < relative < 0.1, "bf16 should round, and no more than round"
