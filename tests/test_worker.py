"""The thread that runs a scheduler for servers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from scripted import ScriptedSession, plain, request, run

from dgemma_trt.errors import UserError
from dgemma_trt.runtime.events import End, Event
from dgemma_trt.runtime.scheduler import Scheduler
from dgemma_trt.runtime.session import CanvasResult, CanvasRows, ContextRows
from dgemma_trt.runtime.worker import Overloaded, Worker


class Gated(ScriptedSession):
    """Lets passes through only while `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.inside = threading.Event(), threading.Event()
        self.gate.set()

    def run(self, context: Sequence[ContextRows], canvases: Sequence[CanvasRows]) -> list[CanvasResult]:
        self.inside.set()
        assert self.gate.wait(30)
        return super().run(context, canvases)


class Listener:
    """Collects one request's events."""

    def __init__(self) -> None:
        self._events: queue.Queue[Event] = queue.Queue()

    def __call__(self, event: Event) -> None:
        self._events.put(event)

    def all(self) -> list[Event]:
        """Up to the end."""
        events = [self._events.get(timeout=30)]
        while not isinstance(events[-1], End):
            events.append(self._events.get(timeout=30))
        assert self._events.empty()
        return events


@pytest.fixture
def session() -> Gated:
    return Gated()


@pytest.fixture
def worker(session: Gated) -> Iterator[Worker]:
    worker = Worker(Scheduler(session), max_waiting=8)
    yield worker
    session.gate.set()
    worker.close()
    assert not worker.alive and session.caches == {}


def until(condition: Callable[[], Any]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


def test_each_request_gets_what_it_gets_alone(worker: Worker) -> None:
    listeners = [Listener() for _ in range(8)]
    for seed, listener in enumerate(listeners):
        worker.submit(request((2, 9, seed), seed=seed), listener)
    for seed, listener in enumerate(listeners):
        assert plain(listener.all()) == plain(run(ScriptedSession(), [request((2, 9, seed), seed=seed)])[0])


def test_submitting_and_cancelling_do_not_wait_for_the_pass_that_runs(session: Gated, worker: Worker) -> None:
    session.gate.clear()
    first, second = Listener(), Listener()
    ticket = worker.submit(request(), first)
    assert session.inside.wait(30)
    started = time.monotonic()
    worker.submit(request((3, 4)), second)
    worker.cancel(ticket)
    assert time.monotonic() - started < 5
    session.gate.set()
    assert first.all()[-1] == End("cancelled")
    assert plain(second.all()) == plain(run(ScriptedSession(), [request((3, 4))])[0])
    assert len({rows.start for _, canvases in session.passes for rows in canvases if rows.slot == 0}) >= 1


def test_a_cancelled_request_takes_part_in_no_further_pass(session: Gated, worker: Worker) -> None:
    session.gate.clear()
    listener = Listener()
    ticket = worker.submit(request(max_denoising_steps=12, stability_threshold=12, end_token_ids=()), listener)
    assert session.inside.wait(30)
    worker.cancel(ticket)
    session.gate.set()
    assert listener.all()[-1] == End("cancelled")
    assert len(session.passes) == 1


def test_more_waiting_requests_than_allowed_are_refused(session: Gated, worker: Worker) -> None:
    session.gate.clear()
    listeners = [Listener() for _ in range(9)]
    worker.submit(request(), listeners[0])
    assert session.inside.wait(30)
    for listener in listeners[1:]:
        worker.submit(request(max_new_tokens=1), listener)
    with pytest.raises(Overloaded, match="8 requests wait"):
        worker.submit(request(), Listener())
    session.gate.set()
    for listener in listeners:
        assert listener.all()[-1].finish_reason in ("stop", "length")  # type: ignore[union-attr]


def test_a_listener_that_fails_loses_its_own_request_only(worker: Worker) -> None:
    def fail(_: Event) -> None:
        raise RuntimeError("the client went away")

    good = Listener()
    bad = worker.submit(request(), fail)
    worker.submit(request((3, 4)), good)
    assert plain(good.all()) == plain(run(ScriptedSession(), [request((3, 4))])[0])
    until(lambda: bad.job is not None and bad.job.done)


def test_closing_tells_every_request_and_takes_no_more(session: Gated) -> None:
    worker = Worker(Scheduler(session))
    session.gate.clear()
    listeners = [Listener() for _ in range(7)]
    for listener in listeners[:5]:
        worker.submit(request(), listener)
    assert session.inside.wait(30)
    for listener in listeners[5:]:
        worker.submit(request(), listener)
    closing = threading.Thread(target=worker.close)
    closing.start()
    session.gate.set()
    closing.join(30)
    assert [listener.all()[-1] for listener in listeners] == [End("cancelled")] * 7
    with pytest.raises(UserError, match="closed"):
        worker.submit(request(), Listener())


def test_a_pass_that_fails_ends_its_requests_and_the_worker_goes_on(session: Gated, worker: Worker) -> None:
    broken, whole = Listener(), Listener()
    session.gate.clear()
    worker.submit(request(), broken)
    assert session.inside.wait(30)
    session.run, fixed = _raise, session.run  # type: ignore[method-assign, assignment]
    session.gate.set()
    # The first pass was under way already; one of the later ones raises.
    assert broken.all()[-1].finish_reason == "error"  # type: ignore[union-attr]
    session.run = fixed  # type: ignore[method-assign]
    worker.submit(request((3, 4)), whole)
    assert plain(whole.all()) == plain(run(ScriptedSession(), [request((3, 4))])[0])


def _raise(*_: Any) -> list[CanvasResult]:
    raise RuntimeError("out of memory")
