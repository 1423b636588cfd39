"""The diffusion loop on scripted sessions: against transformers' own `generate`, alone and in batches, up to every limit.

A scripted session is the network replaced by a function of exactly what a network may use: the tokens in a slot's cache, the
canvas, its soft embeddings. It refuses rows that do not continue the cache, so that stale or misplaced context shows.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from our_draws import patch_draws
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers.models.diffusion_gemma import generation_diffusion_gemma as reference

from dgemma_trt.config import GenerationConfig
from dgemma_trt.errors import UserError
from dgemma_trt.runtime import randomness, sampler
from dgemma_trt.runtime.diffusion import Committed, Draft, End, Event, GenerationParameters, Phase, Request
from dgemma_trt.runtime.generation import TextStream, run_requests
from dgemma_trt.runtime.randomness import Purpose
from dgemma_trt.runtime.session import CanvasResult, CanvasRows, ContextRows, Limits
from dgemma_trt.runtime.vocabulary import read_vocabulary

T, V, HIDDEN, PAD = 8, 37, 5, 0
CONFIG = GenerationConfig(end_token_ids=(1, 5), max_denoising_steps=12)
LIMITS = Limits(max_batch=4, max_context=96, prefill_chunk=6, canvas_length=T)
TABLE = torch.from_numpy(np.random.default_rng(1).normal(size=(V, HIDDEN))).float()
MIXING = torch.from_numpy(np.random.default_rng(2).normal(size=(HIDDEN, V)) * 0.05).float()


def scripted_logits(context: Sequence[int], ids: Tensor, soft: Tensor | None) -> Tensor:
    """Float32 [T, V]: the more of a target, itself a function of the context, the canvas holds, the surer of the rest."""
    hidden_target = _generator(context).integers(0, V, len(ids))
    found = ids.numpy() == hidden_target
    logits = _generator([*context, -1, *ids.tolist()]).normal(size=(len(ids), V)) * 1.5
    logits[np.arange(len(ids)), hidden_target] += 2 + 6 * found.mean() + 4 * found
    return torch.from_numpy(logits).float() + (0 if soft is None else soft @ MIXING)


def _generator(words: Sequence[int]) -> np.random.Generator:
    return np.random.default_rng(list(hashlib.sha256(np.array(words, dtype=np.int64).tobytes()).digest()))


class ScriptedSession:
    """A session whose network is `scripted_logits`, or whatever `answer` makes of a canvas; keeps a record of its passes."""

    def __init__(self, limits: Limits = LIMITS, answer: Callable[[CanvasRows], CanvasResult] | None = None) -> None:
        self.limits = limits
        self.free_slots = list(range(limits.max_batch))
        self.caches: dict[int, list[int]] = {}
        self.passes: list[tuple[list[ContextRows], list[CanvasRows]]] = []
        self._answer = answer or self._denoise

    def run(self, context: Sequence[ContextRows], canvases: Sequence[CanvasRows]) -> list[CanvasResult]:
        self.passes.append((list(context), list(canvases)))
        for group in (context, canvases):
            slots = [rows.slot for rows in group]
            assert len(slots) == len(set(slots)) and set(slots) <= set(range(self.limits.max_batch))
        for chunk in context:
            self._enter(chunk)
            self.caches.setdefault(chunk.slot, []).extend(chunk.ids.tolist())
        for rows in canvases:
            self._enter(rows)
        return [self._answer(rows) for rows in canvases]

    def reset(self, slot: int) -> None:
        self.caches.pop(slot, None)

    def _enter(self, rows: ContextRows | CanvasRows) -> None:
        assert rows.start == len(self.caches.get(rows.slot, [])), "rows must continue their slot's cache"
        assert rows.ids.dtype == torch.int64 and len(rows.ids) >= 1
        assert rows.start + len(rows.ids) <= self.limits.max_context

    def _denoise(self, rows: CanvasRows) -> CanvasResult:
        z = scripted_logits(self.caches[rows.slot], rows.ids, rows.soft_embeddings) / rows.temperature
        read = read_vocabulary(z, rows.uniform)
        soft = (read.probabilities @ TABLE) / read.total[:, None]
        return CanvasResult(read.best_ids, read.sampled_ids, read.entropy, read.best_logprob, soft)


def answering(*canvases: Sequence[int], prompt_length: int, entropy: float = 0.0) -> Callable[[CanvasRows], CanvasResult]:
    """Gives canvas i of a prompt this long the best tokens `canvases[i]`, the last from then on; samples token 36."""

    def answer(rows: CanvasRows) -> CanvasResult:
        best = torch.tensor(canvases[min((rows.start - prompt_length) // T, len(canvases) - 1)])[: len(rows.ids)]
        zeros = torch.zeros(len(best))
        soft = torch.full((len(best), HIDDEN), float(rows.start))
        return CanvasResult(best, torch.full_like(best, V - 1), zeros + entropy, zeros, soft)

    return answer


def request(prompt: Sequence[int] = (2, 9, 4), limits: Limits = LIMITS, **parameters: Any) -> Request:
    return Request(list(prompt), GenerationParameters.of(CONFIG, **parameters), limits, V, PAD)


def run(session: ScriptedSession, requests: Sequence[Request]) -> list[list[Event]]:
    events: list[list[Event]] = [[] for _ in requests]
    for index, event in run_requests(session, requests):
        events[index].append(event)
    return events


def answer_of(events: Sequence[Event]) -> tuple[list[int], str, list[Committed]]:
    """(token ids, finish reason, committed canvases); the end comes last and once."""
    committed = [event for event in events if isinstance(event, Committed)]
    ends = [event for event in events if isinstance(event, End)]
    assert ends == [events[-1]]
    return [token for canvas in committed for token in canvas.token_ids], ends[0].finish_reason, committed


def plain(events: Sequence[Event]) -> list[Any]:
    """Events in a form that compares bit for bit."""
    return [
        (e.canvas, e.step, e.token_ids, e.accepted.tolist(), e.entropy.tolist(), e.mean_entropy) if isinstance(e, Draft) else e
        for e in events
    ]


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


# --- alone, together, in any order -------------------------------------------------------------------------------------------


def mixed_requests() -> list[Request]:
    """Prompts of one token to many chunks, each with parameters of its own."""
    rng = random.Random(3)
    return [
        request(
            [rng.randrange(2, V) for _ in range(rng.choice([1, 2, 5, 6, 7, 13, 30]))],
            seed=rng.randrange(2**64),
            max_new_tokens=rng.choice([None, 1, 3, T, 20, 41]),
            max_denoising_steps=rng.choice([1, 4, 12]),
            temperature=rng.choice([None, 0, 0.5, 1.5]),
            stability_threshold=rng.choice([0, 1, 2]),
        )
        for _ in range(14)
    ]


@pytest.fixture(scope="module")
def alone() -> list[list[Any]]:
    return [plain(run(ScriptedSession(), [each])[0]) for each in mixed_requests()]


@pytest.mark.parametrize("max_batch", [1, 2, 5, 14])
def test_a_request_gets_what_it_gets_alone_in_any_batch_and_order(max_batch: int, alone: list[list[Any]]) -> None:
    limits = Limits(max_batch, LIMITS.max_context, LIMITS.prefill_chunk, T)
    for shuffle in range(2):
        order = list(range(14))
        random.Random(shuffle).shuffle(order)
        fresh = mixed_requests()
        events = run(ScriptedSession(limits), [fresh[index] for index in order])
        for index, each in zip(order, events, strict=True):
            assert plain(each) == alone[index]


def test_the_same_seed_gives_each_prompt_of_a_batch_what_it_gets_alone() -> None:
    prompts = [(2, 9, 4), (2, 9, 4), (3,)]
    events = run(ScriptedSession(), [request(prompt, seed=8) for prompt in prompts])
    assert plain(events[0]) == plain(events[1]) == plain(run(ScriptedSession(), [request(prompts[0], seed=8)])[0])
    assert plain(events[0]) != plain(run(ScriptedSession(), [request(prompts[0], seed=9)])[0])


def test_all_slots_are_used_none_is_left_and_requests_start_in_order() -> None:
    session = ScriptedSession()
    run(session, mixed_requests())
    occupancy = [len({*(c.slot for c in context), *(c.slot for c in canvases)}) for context, canvases in session.passes]
    assert max(occupancy) == 4
    assert session.caches == {}
    started = [rows.ids.tolist() for context, _ in session.passes for rows in context if rows.start == 0]
    first_chunks = [each.next_rows(0)[0] for each in mixed_requests()]
    assert started == [chunk.ids.tolist() for chunk in first_chunks if chunk is not None]


def test_requests_in_different_phases_share_a_pass() -> None:
    session = ScriptedSession()
    run(session, [request((2,) * 30), request((3,))])
    assert any({c.slot for c in context}.isdisjoint({c.slot for c in canvases}) for context, canvases in session.passes)


def test_slots_are_freed_when_the_session_raises_or_the_caller_stops_listening() -> None:
    def fail(_: CanvasRows) -> CanvasResult:
        raise RuntimeError("out of memory")

    session = ScriptedSession(answer=fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(session, [request(), request()])
    assert session.caches == {}

    session = ScriptedSession()
    events = run_requests(session, [request(), request()])
    next(events)
    assert session.caches
    events.close()  # type: ignore[attr-defined]
    assert session.caches == {}


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
    assert answer_of(run(session, [each])[0]) == ([], "stop", [Committed(0, [], 2, True)])
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
    ],
)
def test_parameters_out_of_range_or_unknown_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=name):
        GenerationParameters.of(CONFIG, **{name: value})


def test_parameters_that_are_not_given_are_the_checkpoints() -> None:
    chosen = GenerationParameters.of(CONFIG, seed=3, temperature=None, t_max=None)
    assert {name: getattr(chosen, name) for name in vars(CONFIG)} == vars(CONFIG)
    assert (chosen.seed, chosen.temperature, chosen.max_new_tokens) == (3, 1.0, None)


# --- faults, statistics, text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["entropy", "best_logprob"])
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


TEXT = "naïve ☕€ — 日本語 👩‍🚀🏳️‍🌈 end"


def byte_fallback() -> Tokenizer:
    """Like Gemma's: what is not in the vocabulary becomes one token a UTF-8 byte."""
    words = ["<pad>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefghijklmnopqrstuvwxyz▁日"]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def byte_level() -> Tokenizer:
    words = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("make", [byte_fallback, byte_level])
def test_characters_split_across_canvases_are_held_back_until_whole(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<end>", special=True)])
    ids = [token for part in TEXT.split("e") for token in (*tokenizer.encode(part).ids, 0, *tokenizer.encode("e").ids)][:-2]
    assert tokenizer.decode(ids) == TEXT
    for size in range(1, 12):
        stream = TextStream(tokenizer.decode)
        pieces = [stream.add(ids[start : start + size]) for start in range(0, len(ids), size)]
        assert "".join(pieces) == TEXT
        assert all(TEXT.startswith("".join(pieces[:count])) for count in range(len(pieces)))


def test_half_a_character_at_the_end_of_the_answer_is_not_lost() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer.decode)
    assert stream.add(tokenizer.encode("ab☕").ids[:-1]) == "ab"
    assert stream.add([], last=True) == "\N{REPLACEMENT CHARACTER}"
