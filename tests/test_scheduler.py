"""Continuous batching on scripted sessions: what a request gets, when it gets its turn, what happens when things go wrong."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import LIMITS, ScriptedSession, T, V, answer_of, answering, decode, plain, request, run

from dgemma_trt.errors import UserError
from dgemma_trt.runtime.diffusion import Request
from dgemma_trt.runtime.events import Committed, Draft, End
from dgemma_trt.runtime.scheduler import BLOCK, PASSED_BY, Job, Scheduler
from dgemma_trt.runtime.session import CanvasResult, CanvasRows, ContextRows, Limits

LONG = Limits(max_batch=4, max_context=4 * BLOCK, prefill_chunk=64, canvas_length=T)


def mixed_requests(count: int = 14, seed: int = 3, limits: Limits = LIMITS, **options: Any) -> list[Request]:
    """Prompts of one token to many chunks, each with parameters of its own."""
    rng = random.Random(seed)
    lengths = (1, 2, 5, 6, 7, 13, limits.max_context // 3)
    return [
        request(
            [rng.randrange(2, V) for _ in range(rng.choice(lengths))],
            limits,
            **options,
            seed=rng.randrange(2**64),
            max_new_tokens=rng.choice([None, 1, 3, T, 20, 41]),
            max_denoising_steps=rng.choice([1, 4, 12]),
            temperature=rng.choice([None, 0, 0.5, 1.5]),
            stability_threshold=rng.choice([0, 1, 2]),
            stop=rng.choice([(), ("7",), ("ab", "q=")]),
        )
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def alone() -> list[list[Any]]:
    return [plain(run(ScriptedSession(), [each])[0]) for each in mixed_requests()]


# --- what a request gets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_batch", [1, 2, 5, 14])
@pytest.mark.parametrize("fuse", [True, False])
def test_a_request_gets_what_it_gets_alone_in_any_batch_and_order(max_batch: int, fuse: bool, alone: list[list[Any]]) -> None:
    limits = Limits(max_batch, LIMITS.max_context, LIMITS.prefill_chunk, T)
    for shuffle in range(2):
        order = list(range(14))
        random.Random(shuffle).shuffle(order)
        fresh = mixed_requests(fuse=fuse)
        events = run(ScriptedSession(limits), [fresh[index] for index in order])
        for index, each in zip(order, events, strict=True):
            assert plain(each) == alone[index]


def test_the_same_seed_gives_each_prompt_of_a_batch_what_it_gets_alone() -> None:
    prompts = [(2, 9, 4), (2, 9, 4), (3,)]
    events = run(ScriptedSession(), [request(prompt, seed=8) for prompt in prompts])
    assert plain(events[0]) == plain(events[1]) == plain(run(ScriptedSession(), [request(prompts[0], seed=8)])[0])
    assert plain(events[0]) != plain(run(ScriptedSession(), [request(prompts[0], seed=9)])[0])


def test_drafts_change_nothing_but_that_they_are_told(alone: list[list[Any]]) -> None:
    for expected, events in zip(alone, run(ScriptedSession(), mixed_requests(drafts=False)), strict=True):
        assert events == [event for event in expected if not isinstance(event, tuple)]


def test_unfused_context_enters_in_passes_of_its_own() -> None:
    for fuse, passes in ((True, 4), (False, 6)):
        session = ScriptedSession(answer=answering([9] * T, prompt_length=3))
        run(session, [request(max_new_tokens=2 * T, fuse=fuse)])
        assert len(session.passes) == passes
        assert any(context and canvases for context, canvases in session.passes) == fuse


def cramped(seed: int) -> tuple[ScriptedSession, list[Request]]:
    """Four slots, but blocks for little more than one request of full length."""
    session = ScriptedSession(LONG)
    rng = random.Random(seed)
    prompts = [[rng.randrange(2, V) for _ in range(rng.choice([3, 200, 250, 500]))] for _ in range(8)]
    return session, [request(prompt, LONG, seed=seed, end_token_ids=(), max_denoising_steps=2) for prompt in prompts]


def test_preempted_requests_get_what_they_get_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgemma_trt.runtime.scheduler.FORESEEN", T)
    session, requests = cramped(0)
    scheduler = Scheduler(session, cache_positions=5 * BLOCK)
    jobs = [scheduler.submit(each) for each in requests]
    while scheduler.step():
        assert 0 <= scheduler.cache_used <= 1
    assert scheduler.totals.preemptions == sum(each.statistics.preemptions for each in requests) > 3
    for job, again in zip(jobs, cramped(0)[1], strict=True):
        assert plain(list(job.events)) == plain(run(ScriptedSession(LONG), [again])[0])


def test_the_oldest_request_is_never_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgemma_trt.runtime.scheduler.FORESEEN", T)
    session, requests = cramped(1)
    run(session, requests, cache_positions=5 * BLOCK)
    assert requests[0].statistics.preemptions == 0
    assert sum(each.statistics.preemptions for each in requests) > 0


# --- turns -------------------------------------------------------------------------------------------------------------------


def test_all_slots_are_used_none_is_left_and_requests_start_in_order() -> None:
    session = ScriptedSession()
    run(session, mixed_requests())
    occupancy = [len({*(c.slot for c in context), *(c.slot for c in canvases)}) for context, canvases in session.passes]
    assert max(occupancy) == 4
    started = [rows.ids.tolist() for context, _ in session.passes for rows in context if rows.start == 0]
    first_chunks = [each.next_rows(0)[0] for each in mixed_requests()]
    assert sorted(started) == sorted(chunk.ids.tolist() for chunk in first_chunks if chunk is not None)


def test_requests_in_different_phases_share_a_pass() -> None:
    session = ScriptedSession()
    run(session, [request((2,) * 30), request((3,))])
    assert any({c.slot for c in context}.isdisjoint({c.slot for c in canvases}) for context, canvases in session.passes)


def test_no_canvas_waits_and_prompts_take_turns_within_one_chunk_a_pass() -> None:
    """Whatever is being denoised is in every pass until it ends; prompts add at most a chunk's tokens to one."""
    limits = Limits(8, 256, 16, T)
    session = ScriptedSession(limits)
    scheduler = Scheduler(session)
    rng = random.Random(5)
    jobs = [
        scheduler.submit(request([rng.randrange(2, V)] * rng.choice([1, 5, 100, 200]), limits, seed=seed, max_new_tokens=30))
        for seed in range(40)
    ]
    denoising: dict[int, int] = {}
    most = 0
    while scheduler.step():
        context, canvases = session.passes[-1]
        slots = {rows.slot for rows in canvases}
        assert {slot for job, slot in denoising.items() if not jobs[job].done or slot in slots} <= slots
        prompts = sum(len(rows.ids) for rows in context if rows.slot not in denoising.values())
        assert prompts <= limits.prefill_chunk
        most = max(most, prompts)
        denoising = {job.number: job.slot for job in jobs if job.slot in slots and not job.done and job.slot is not None}
    assert most == limits.prefill_chunk
    assert all(job.done for job in jobs)


def test_short_prompts_start_while_a_long_one_enters() -> None:
    limits = Limits(4, 512, 16, T)
    session = ScriptedSession(limits)
    scheduler = Scheduler(session)
    long = scheduler.submit(request([2] * 400, limits, max_new_tokens=1))
    short = [scheduler.submit(request([3, seed], limits, max_new_tokens=1, seed=seed)) for seed in range(3)]
    while not all(job.done for job in short):
        scheduler.step()
    assert not any(isinstance(event, Draft) for event in long.events)


def test_a_request_that_does_not_fit_yet_is_passed_by_a_few_only() -> None:
    session = ScriptedSession(LONG)
    scheduler = Scheduler(session, cache_positions=6 * BLOCK)
    order: list[int] = []
    running = [scheduler.submit(request([2] * 600, LONG, max_new_tokens=400, end_token_ids=()))]
    scheduler.step()
    large = scheduler.submit(request([3] * 900, LONG, max_new_tokens=4))
    small = [scheduler.submit(request([4], LONG, max_new_tokens=1, seed=seed)) for seed in range(30)]
    while scheduler.step():
        order.extend(job.number for job in (large, *small) if job.slot is not None or (job.done and job.number not in order))
    started = list(dict.fromkeys(order))
    assert 0 < started.index(large.number) <= PASSED_BY
    assert running[0].done


# --- faults ------------------------------------------------------------------------------------------------------------------


class Failing(ScriptedSession):
    """Raises in one pass, by its number."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self._at, self._error = at, error

    def run(self, context: Sequence[ContextRows], canvases: Sequence[CanvasRows]) -> list[CanvasResult]:
        results = super().run(context, canvases)
        if len(self.passes) == self._at:
            raise self._error
        return results


def test_a_pass_that_fails_ends_its_requests_and_no_other() -> None:
    session = Failing(3, RuntimeError("out of memory"))
    scheduler = Scheduler(session)
    jobs = [scheduler.submit(request((2, 9, seed), seed=seed)) for seed in range(6)]
    while scheduler.step():
        pass
    ends = [job.events[-1] for job in jobs]
    expected = End("error", "a pass failed: RuntimeError: out of memory")
    assert ends[:4] == [expected] * 4
    for seed in (4, 5):
        assert plain(list(jobs[seed].events)) == plain(run(ScriptedSession(), [request((2, 9, seed), seed=seed)])[0])
    assert session.caches == {} and scheduler.cache_used == 0
    assert scheduler.totals.finished == {"error": 4, **_count(ends[4:])}


def _count(ends: Sequence[Any]) -> dict[str, int]:
    reasons = [end.finish_reason for end in ends]
    return {reason: reasons.count(reason) for reason in reasons}


def test_an_interrupt_frees_everything_and_is_passed_on() -> None:
    session = Failing(2, KeyboardInterrupt())
    scheduler = Scheduler(session)
    jobs = [scheduler.submit(request((2, seed))) for seed in range(2)]
    with pytest.raises(KeyboardInterrupt):
        while scheduler.step():
            pass
    assert [job.events[-1] for job in jobs] == [End("cancelled")] * 2
    assert session.caches == {} and scheduler.running == 0


def test_cancelling_frees_the_slot_at_once_and_touches_no_neighbour() -> None:
    session = ScriptedSession()
    scheduler = Scheduler(session)
    jobs = [scheduler.submit(request((2, 9, seed), seed=seed)) for seed in range(6)]
    scheduler.step()
    scheduler.step()
    scheduler.cancel(jobs[1])
    scheduler.cancel(jobs[5])
    scheduler.cancel(jobs[1])
    assert jobs[1].slot is None and scheduler.running == 3 and scheduler.waiting == 1
    assert [jobs[1].events[-1], *jobs[5].events] == [End("cancelled")] * 2
    scheduler.step()
    assert jobs[4].slot is not None, "the freed slot is given away at the next step"
    while scheduler.step():
        pass
    for seed in (0, 2, 3, 4):
        assert plain(list(jobs[seed].events)) == plain(run(ScriptedSession(), [request((2, 9, seed), seed=seed)])[0])
    scheduler.cancel(jobs[0])
    assert list(jobs[0].events)[-1] != End("cancelled")
    assert scheduler.totals.finished["cancelled"] == 2


def test_closing_a_stream_cancels_its_request() -> None:
    session = ScriptedSession()
    scheduler = Scheduler(session)
    job = scheduler.submit(request())
    events = scheduler.stream(job)
    next(events)
    assert session.caches
    events.close()  # type: ignore[attr-defined]
    assert session.caches == {} and job.done and scheduler.totals.finished == {"cancelled": 1}


def test_closing_the_scheduler_ends_every_request_and_takes_no_more() -> None:
    session = ScriptedSession()
    scheduler = Scheduler(session)
    jobs = [scheduler.submit(request((2, seed))) for seed in range(7)]
    scheduler.step()
    scheduler.close()
    assert [job.events[-1] for job in jobs] == [End("cancelled")] * 7
    assert session.caches == {} and not scheduler.step()
    with pytest.raises(UserError, match="closed"):
        scheduler.submit(request())


def test_a_cache_that_cannot_hold_one_request_is_refused() -> None:
    with pytest.raises(UserError, match="768 positions cannot hold one request of 1024"):
        Scheduler(ScriptedSession(LONG), cache_positions=3 * BLOCK)


def test_streams_in_many_threads_each_get_their_own_answer() -> None:
    expected = [plain(run(ScriptedSession(), [request((2, 9, seed), seed=seed)])[0]) for seed in range(12)]
    scheduler = Scheduler(ScriptedSession())
    got: dict[int, list[Any]] = {}

    def listen(seed: int) -> None:
        got[seed] = plain(list(scheduler.stream(scheduler.submit(request((2, 9, seed), seed=seed)))))

    threads = [threading.Thread(target=listen, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[seed] for seed in range(12)] == expected


# --- any history -------------------------------------------------------------------------------------------------------------


def lived(seed: int, count: int, cancellations: float, fuse: bool) -> Scheduler:
    """A scheduler's life: requests come and are cancelled at random; what is left must be what each gets alone."""
    rng = random.Random(seed)
    limits = Limits(rng.choice([1, 3, 6]), 2 * BLOCK, rng.choice([5, 64]), T)
    session = ScriptedSession(limits)
    scheduler = Scheduler(session, cache_positions=BLOCK * rng.choice([2, 3, 12]))
    coming, jobs, cancelled = mixed_requests(count, seed, limits, fuse=fuse), [], set()
    while coming or scheduler.step():
        for _ in range(rng.choice([0, 0, 1, 5])):
            if coming:
                jobs.append(scheduler.submit(coming.pop(0)))
        if jobs and rng.random() < cancellations:
            victim = rng.choice(jobs[-10:])
            if not victim.done:
                cancelled.add(victim.number)
            scheduler.cancel(victim)
        _check_accounts(scheduler, session, jobs)
    assert scheduler.cache_used == scheduler.running == scheduler.waiting == 0
    for number in rng.sample(range(count), min(count, 12)):
        again = mixed_requests(count, seed, limits)[number]
        whole, got = plain(run(ScriptedSession(limits), [again])[0]), plain(list(jobs[number].events))
        assert got == (whole if number not in cancelled else [*whole[: len(got) - 1], End("cancelled")])
    assert sum(scheduler.totals.finished.values()) == count
    return scheduler


def _check_accounts(scheduler: Scheduler, session: ScriptedSession, jobs: Sequence[Job]) -> None:
    slots = [job.slot for job in jobs if job.slot is not None]
    assert len(slots) == len(set(slots)) == scheduler.running <= session.limits.max_batch
    assert set(session.caches) <= set(slots)
    assert all(len(session.caches.get(job.slot, [])) <= job.blocks * BLOCK for job in jobs if job.slot is not None)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), fuse=st.booleans())
def test_whatever_comes_and_goes_each_request_gets_what_it_gets_alone(seed: int, fuse: bool) -> None:
    lived(seed, 15, 0.2, fuse)


@pytest.mark.long
def test_a_thousand_requests_leave_nothing_behind() -> None:
    tracked = []
    for part in range(4):
        totals = lived(part, 250, 0.1, fuse=True).totals
        tracked.append(totals.finished.get("cancelled", 0))
    assert sum(tracked) > 50


# --- statistics --------------------------------------------------------------------------------------------------------------


def test_statistics_tell_times_and_tokens_given_out() -> None:
    session = ScriptedSession(answer=answering([9] * T, prompt_length=3))
    scheduler = Scheduler(session)
    jobs = [scheduler.submit(request(max_new_tokens=T + 3)) for _ in range(6)]
    while scheduler.step():
        pass
    for job in jobs:
        seen = job.request.statistics
        assert seen.emitted == T + 3
        assert seen.seconds_to_start is not None and seen.seconds_to_first_canvas is not None and seen.seconds is not None
        assert 0 <= seen.seconds_to_start < seen.seconds_to_first_canvas < seen.seconds
        assert seen.tokens_per_second == pytest.approx(seen.emitted / seen.seconds)
    totals = scheduler.totals
    assert totals.emitted == 6 * (T + 3) and totals.finished == {"length": 6}
    assert totals.passes == len(session.passes) == 8
    assert totals.steps == sum(len(canvases) for _, canvases in session.passes) == 24
    assert totals.occupancy == 3
    assert totals.context == sum(len(rows.ids) for context, _ in session.passes for rows in context)


def test_committed_canvases_carry_text_and_logprobs() -> None:
    events = run(ScriptedSession(), [request((2, 20, seed), seed=seed, max_new_tokens=21) for seed in range(6)])
    for each in events:
        tokens, _, canvases = answer_of(each)
        assert "".join(canvas.text for canvas in canvases) == decode(tokens)
        for canvas in canvases:
            assert len(canvas.logprobs) == len(canvas.token_ids)
            assert all(logprob <= 0 for logprob in canvas.logprobs)


def test_a_stop_string_ends_the_answer_also_across_canvases() -> None:
    written = [[9, 10, 11, 12, 13, 14, 15, 16], [17, 18, 19, 20, 21, 22, 23, 24]]
    whole = "9abcdefghijklmno"
    for stop, text, tokens in (("gh", "9abcdef", 9), ("ab", "9", 3), ("no", whole[:-2], 16), ("zz", whole, 16)):
        session = ScriptedSession(answer=answering(*written, prompt_length=3))
        found, reason, canvases = answer_of(run(session, [request(max_new_tokens=2 * T, stop=stop)])[0])
        assert "".join(canvas.text for canvas in canvases) == text
        assert len(found) == tokens and reason == ("length" if stop == "zz" else "stop")
        assert all(isinstance(canvas, Committed) for canvas in canvases)
