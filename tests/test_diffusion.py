"""The diffusion loop on scripted sessions: against transformers' own `generate`, pass by pass, up to every limit."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from our_draws import patch_draws
from scripted import (
    CONFIG,
    PAD,
    TABLE,
    ScriptedSession,
    T,
    V,
    answer_of,
    answering,
    plain,
    request,
    run,
    scripted_logits,
)
from torch import Tensor
from transformers.models.diffusion_gemma import generation_diffusion_gemma as reference

from dgemma_trt.config import GenerationConfig
from dgemma_trt.errors import UserError
from dgemma_trt.runtime import randomness, sampler
from dgemma_trt.runtime.diffusion import Phase
from dgemma_trt.runtime.events import Committed, Draft, End
from dgemma_trt.runtime.parameters import GenerationParameters
from dgemma_trt.runtime.randomness import Purpose
from dgemma_trt.runtime.session import CanvasResult, CanvasRows

# --- against the reference ---------------------------------------------------------------------------------------------------


class ReferenceModel(reference.DiffusionGemmaGenerationMixin):
    """transformers' `generate` around the scripted network, rows of a batch one after the other."""

    dtype = torch.float32

    def __init__(self, config: GenerationConfig) -> None:
        self.config = SimpleNamespace(canvas_length=T, text_config=SimpleNamespace(vocab_size=V), image_token_id=-1)
        self.model = SimpleNamespace(
            encoder=self._Encoder(),
            decoder=SimpleNamespace(
                create_diffusion_decoder_attention_mask=lambda **_: {}, embed_tokens=SimpleNamespace(weight=TABLE)
            ),
        )
        self.generation_config = reference.DiffusionGemmaGenerationConfig(
            max_denoising_steps=config.max_denoising_steps,
            sampler_config=reference.EntropyBoundSamplerConfig(config.entropy_bound),
            t_min=config.t_min,
            t_max=config.t_max,
            stability_threshold=config.stability_threshold,
            confidence_threshold=config.confidence_threshold,
            pad_token_id=PAD,
            eos_token_id=list(config.end_token_ids),
        )

    class _Encoder:
        def create_masks_for_generate(self, **_: Any) -> dict[str, Tensor]:
            return {}

        def __call__(self, input_ids: Tensor, cache: Any, **_: Any) -> Any:
            cache.ids = torch.cat([cache.ids, input_ids], dim=1)
            return SimpleNamespace(cache=cache)

    def _prepare_cache_for_generation(self, batch_size: int, **_: Any) -> Any:
        return SimpleNamespace(ids=torch.empty(batch_size, 0, dtype=torch.int64), is_compileable=False)

    def forward(
        self, decoder_input_ids: Tensor, self_conditioning_logits: Tensor | None, cache: Any, **_: Any
    ) -> SimpleNamespace:
        rows = []
        for row, (context, ids) in enumerate(zip(cache.ids.tolist(), decoder_input_ids, strict=True)):
            soft = None if self_conditioning_logits is None else self_conditioning_logits[row].softmax(-1) @ TABLE
            rows.append(scripted_logits(context, ids, soft))
        return SimpleNamespace(logits=torch.stack(rows))


class Drafts:
    """A streamer that keeps the drafts."""

    def __init__(self) -> None:
        self.drafts: list[list[list[int]]] = []

    def put(self, value: Tensor) -> None:
        pass

    def put_draft(self, value: Tensor) -> None:
        self.drafts.append(value.tolist())

    def end(self) -> None:
        pass


@pytest.mark.parametrize(
    ("seed", "parameters"),
    [
        (0, {}),
        (1, {"stability_threshold": 0}),
        (2, {"stability_threshold": 2}),
        (3, {"max_denoising_steps": 5}),
        (4, {"entropy_bound": 2.0, "t_min": 0.2, "t_max": 1.3}),
        (2**64 - 1, {"confidence_threshold": 0.2, "end_token_ids": (1,)}),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_whole_runs_equal_those_of_the_reference(
    seed: int, parameters: dict[str, Any], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft, every canvas and the tokens per forward pass, on the same logits and draws."""
    prompts = torch.tensor([[2, 7 + row, 11, 30 - row, seed % V, 6, 8] for row in range(batch)])
    ours = [request(prompt, seed=seed, max_new_tokens=5 * T, **parameters) for prompt in prompts.tolist()]
    events = run(ScriptedSession(), ours)

    chosen = GenerationConfig(**{**vars(CONFIG), **parameters})
    streamer = Drafts()
    patch_draws(monkeypatch, seed, T)
    theirs = ReferenceModel(chosen).generate(prompts, streamer=streamer, max_new_tokens=5 * T)

    canvases = theirs.sequences[:, prompts.shape[1] :].unflatten(1, (-1, T)).tolist()
    for row, each in enumerate(ours):
        tokens, reason, committed = answer_of(events[row])
        flat = [token for canvas in canvases[row] for token in canvas]
        kept, ended = sampler.before_end(flat, chosen.end_token_ids)
        assert (tokens, reason) == (kept, "stop" if ended else "length")
        assert len(committed) == 1 + (len(tokens) - (not ended)) // T
        assert each.statistics.tokens_per_forward == pytest.approx(float(theirs.tokens_per_forward[row]))
    if batch == 1:
        assert [draft.token_ids for draft in events[0] if isinstance(draft, Draft)] == [rows[0] for rows in streamer.drafts]


def test_the_scripted_network_settles_wavers_and_ends_at_different_steps() -> None:
    """Else the comparisons of this file would prove little."""
    requests = [request((2, 20, row), seed=row, max_new_tokens=5 * T) for row in range(24)]
    answers = [answer_of(events) for events in run(ScriptedSession(), requests)]
    committed = [canvas for _, _, canvases in answers for canvas in canvases]
    assert {reason for _, reason, _ in answers} == {"stop", "length"}
    assert {canvas.converged for canvas in committed} == {True, False}
    assert len({canvas.steps for canvas in committed}) > 4
    assert max(len(canvases) for _, _, canvases in answers) == 5


# --- passes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5, 6, 7, 12, 13, 30])
def test_prompt_chunks_lie_on_the_grid_and_the_last_shares_its_pass_with_the_first_step(length: int) -> None:
    session = ScriptedSession(answer=answering([9] * T, prompt_length=length))
    run(session, [request(range(2, 2 + length), max_new_tokens=1)])
    chunks = -(-length // 6)
    for index, (context, canvases) in enumerate(session.passes[:chunks]):
        assert [(rows.start, rows.ids.tolist()) for rows in context] == [
            (6 * index, list(range(2, 2 + length))[6 * index : 6 * index + 6])
        ]
        assert len(canvases) == (index == chunks - 1)
    assert all(not context and len(canvases) == 1 for context, canvases in session.passes[chunks:])


def test_a_commit_shares_its_pass_with_the_next_first_step_and_the_last_canvas_is_not_committed() -> None:
    written = [[9, 10, 11, 12, 13, 14, 15, 16], [17] * T, [18] * T]
    session = ScriptedSession(answer=answering(*written, prompt_length=3))
    run(session, [request(max_new_tokens=3 * T)])
    layout = [
        ([(rows.start, rows.ids.tolist()) for rows in context], [rows.start for rows in canvases])
        for context, canvases in session.passes
    ]
    assert layout == [
        ([(0, [2, 9, 4])], [3]),
        ([], [3]),
        ([(3, written[0])], [11]),
        ([], [11]),
        ([(11, written[1])], [19]),
        ([], [19]),
    ]


def test_what_a_request_contributes_is_the_same_until_the_result_is_taken() -> None:
    """So a pass that failed can be run again."""
    session, each = ScriptedSession(), request(range(2, 15))
    while each.phase is not Phase.FINISHED:
        first, second = each.next_rows(1), each.next_rows(1)
        for one, other in zip(first, second, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or (one.start, one.ids.tolist()) == (other.start, other.ids.tolist())
        results = session.run([r for r in first[:1] if r is not None], [r for r in first[1:] if r is not None])
        each.take(results[0] if results else None)


def test_a_prompt_that_is_one_whole_chunk_is_never_in_a_phase_of_its_own() -> None:
    for length, phase in ((6, Phase.DENOISE), (7, Phase.PREFILL), (1, Phase.DENOISE)):
        assert request(range(2, 2 + length)).phase is phase


@pytest.mark.parametrize(("threshold", "steps"), [(0, 1), (1, 2), (2, 3)])
def test_every_canvas_starts_from_nothing(threshold: int, steps: int) -> None:
    """With the same certain argmax in each: leftover history would stop the second canvas a step early."""
    session = ScriptedSession(answer=answering([9] * T, prompt_length=3))
    events = run(session, [request(max_new_tokens=4 * T, stability_threshold=threshold, seed=5)])[0]
    assert [canvas.steps for canvas in answer_of(events)[2]] == [steps] * 4
    canvases = [rows for _, canvases in session.passes for rows in canvases]
    for index in range(4):
        first, *later = canvases[index * steps : (index + 1) * steps]
        assert first.soft_embeddings is None
        assert torch.equal(first.ids, randomness.tokens(5, index, 0, Purpose.INITIAL_CANVAS, T, V))
        assert first.temperature == pytest.approx(0.8)
        for rows in later:
            assert rows.soft_embeddings is not None and (rows.soft_embeddings == first.start).all()


def test_a_canvas_that_ran_out_of_steps_also_leaves_nothing_behind() -> None:
    session = ScriptedSession(answer=answering([9] * T, prompt_length=3, entropy=1.0))
    events = run(session, [request(max_new_tokens=2 * T, max_denoising_steps=3)])[0]
    assert [(canvas.steps, canvas.converged) for canvas in answer_of(events)[2]] == [(3, False)] * 2
    canvases = [rows for _, canvases in session.passes for rows in canvases]
    assert [rows.soft_embeddings is None for rows in canvases] == [True, False, False] * 2
    assert [rows.temperature for rows in canvases] == pytest.approx([0.8, 0.4 + 0.8 / 3, 0.4 + 0.4 / 3] * 2)


def test_the_next_canvas_keeps_what_was_accepted_and_renoises_the_rest() -> None:
    session = ScriptedSession(answer=answering([9] * T, prompt_length=3, entropy=0.0625))
    events = run(session, [request(max_new_tokens=T, max_denoising_steps=4, entropy_bound=0.125, seed=3)])[0]
    canvases = [rows for _, canvases in session.passes for rows in canvases]
    for step, rows in enumerate(canvases[1:], start=1):
        assert rows.ids.tolist() == [V - 1] * 3 + randomness.tokens(3, 0, step, Purpose.RENOISE, T, V)[3:].tolist()
    for step, rows in enumerate(canvases, start=1):
        assert torch.equal(rows.uniform, randomness.uniforms(3, 0, step, Purpose.SAMPLE, T))
    assert answer_of(events)[0] == [9] * T, "what is emitted is the argmax of the last step, not the canvas"


def test_temperature_zero_takes_the_argmax_and_others_multiply_the_schedule() -> None:
    for temperature, token, first in ((None, V - 1, 0.8), (1, V - 1, 0.8), (0.5, V - 1, 0.4), (0, 9, 0.8)):
        session = ScriptedSession(answer=answering([9] * T, prompt_length=3))
        run(session, [request(max_new_tokens=T, max_denoising_steps=2, temperature=temperature)])
        first_rows, second_rows = (canvases[0] for _, canvases in session.passes)
        assert second_rows.ids.tolist() == [token] * T
        assert first_rows.temperature == pytest.approx(first)
        assert second_rows.temperature == pytest.approx(first * 0.75)


# --- limits and ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, T - 1, T, T + 1, 3 * T - 1, 3 * T])
def test_the_limit_is_exact(limit: int) -> None:
    written = [list(range(9, 9 + T)), list(range(18, 18 + T)), [30] * T]
    session = ScriptedSession(answer=answering(*written, prompt_length=3))
    tokens, reason, committed = answer_of(run(session, [request(max_new_tokens=limit)])[0])
    assert (tokens, reason) == ([token for canvas in written for token in canvas][:limit], "length")
    assert len(committed) == -(-limit // T)


def test_an_end_token_stops_within_the_limit_only() -> None:
    for place, limit in itertools.product((0, 3, T - 1, T, T + 2), (1, 3, 4, T, T + 1, T + 3, None)):
        flat = [9] * 3 * T
        flat[place], flat[place + 1] = 5, 1
        written = [flat[:T], flat[T : 2 * T], flat[2 * T :]]
        session = ScriptedSession(answer=answering(*written, prompt_length=3))
        tokens, reason, committed = answer_of(run(session, [request(max_new_tokens=limit)])[0])
        stops = limit is None or place < limit
        assert (tokens, reason) == ([9] * (place if stops else limit or 0), "stop" if stops else "length")
        assert len(committed) == -(-(place + 1 if stops else len(tokens)) // T)


def test_a_canvas_of_end_tokens_is_an_empty_answer() -> None:
    session = ScriptedSession(answer=answering([1] * T, prompt_length=3))
    each = request()
    assert answer_of(run(session, [each])[0]) == ([], "stop", [Committed(0, [], "", [], 2, True)])
    assert each.statistics.tokens == [1]


def test_without_a_limit_the_answer_ends_with_the_context_in_a_shorter_canvas() -> None:
    for prompt_length in (1, 78, 80, 87, 88, 94, 95):
        session = ScriptedSession(answer=answering([9] * T, prompt_length=prompt_length))
        tokens, reason, committed = answer_of(run(session, [request([2] * prompt_length)])[0])
        assert (len(tokens), reason) == (96 - prompt_length, "length")
        assert [len(canvas.token_ids) for canvas in committed[:-1]] == [T] * (len(committed) - 1)
        last = session.passes[-1][1][0]
        assert last.start + len(last.ids) == 96 and len(last.ids) == len(last.uniform) <= T


def test_the_scripted_network_runs_into_the_context_limit() -> None:
    session = ScriptedSession()
    requests = [request([2] * length, end_token_ids=(), seed=length) for length in (70, 75, 91)]
    assert [len(answer_of(events)[0]) for events in run(session, requests)] == [26, 21, 5]


def test_prompts_without_room_are_refused() -> None:
    for length in (96, 97, 1000):
        with pytest.raises(UserError, match=rf"has {length} tokens, the limit is 96 .*; shorten it"):
            request([2] * length)
    with pytest.raises(UserError, match="prompt is empty"):
        request([])
    for token in (-1, V):
        with pytest.raises(UserError, match=f"outside 0 … {V - 1}"):
            request([2, token])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.5),
        ("max_denoising_steps", 0),
        ("stability_threshold", -1),
        ("entropy_bound", 0.0),
        ("entropy_bound", float("nan")),
        ("confidence_threshold", -1.0),
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("t_min", 0.9),
        ("t_max", 0.1),
        ("seed", 2**64),
        ("top_k", 40),
        ("logit_bias", {3: 1.0}),
        ("frobnicate", 1),
        ("stop", ("",)),
        ("stop", (3,)),
        ("drafts", 1),
        ("end_token_ids", "a"),
    ],
)
def test_parameters_out_of_range_or_unknown_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=name):
        GenerationParameters.of(CONFIG, **{name: value})


def test_parameters_that_are_not_given_are_the_checkpoints() -> None:
    chosen = GenerationParameters.of(CONFIG, seed=3, temperature=None, t_max=None)
    assert {name: getattr(chosen, name) for name in vars(CONFIG)} == vars(CONFIG)
    assert (chosen.seed, chosen.temperature, chosen.max_new_tokens) == (3, 1.0, None)


# --- faults, statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["entropy", "best_logprob", "soft_embeddings"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_ends_its_request_and_no_other(name: str, value: float) -> None:
    class Broken(ScriptedSession):
        def _denoise(self, rows: CanvasRows) -> CanvasResult:
            result = super()._denoise(rows)
            if self.caches[rows.slot][0] == 3 and rows.soft_embeddings is not None:
                getattr(result, name)[2] = value
            return result

    prompts = [(2, 9), (3, 9), (4, 9)]
    whole = run(ScriptedSession(), [request(prompt) for prompt in prompts])
    session = Broken()
    events = run(session, [request(prompt) for prompt in prompts])
    assert [plain(events[row]) for row in (0, 2)] == [plain(whole[row]) for row in (0, 2)]
    assert plain(events[1][:1]) == plain(whole[1][:1])
    assert events[1][1:] == [End("error", f"{name} is not finite in canvas 1, step 2; the engine or its weights are damaged")]
    assert session.caches == {}


def test_statistics_count_steps_acceptances_and_tokens_that_are_not_padding() -> None:
    written = [[9, PAD, 9, 9, 9, 9, 9, 9], [9, 9, PAD, 1, 9, 9, 9, 9]]
    session = ScriptedSession(answer=answering(*written, prompt_length=3, entropy=0.0009765625))
    each = request(entropy_bound=0.00390625)
    assert answer_of(run(session, [each])[0])[1] == "stop"
    assert each.statistics.steps == [2, 2]
    assert each.statistics.accepted == [[5, 5], [5, 5]]
    assert each.statistics.tokens == [7, 3]
    assert each.statistics.tokens_per_forward == 2.5
