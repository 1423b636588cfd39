"""Continuous batching: requests join and leave between denoising steps and share every pass.

Each pass holds every canvas that is being denoised, and prompts enter in turns, at most about one chunk of tokens a pass: so no
canvas waits for more than one chunk, however long the prompts are. Requests are admitted in the order in which they came, when
a slot is free and the KV cache has blocks for what they are foreseen to need. When blocks run out, the youngest request is
preempted between two of its canvases; its context is computed again later, and its tokens stay the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from dgemma_trt.errors import UserError
from dgemma_trt.runtime.diffusion import Phase, Request
from dgemma_trt.runtime.events import Committed, End, Event
from dgemma_trt.runtime.session import CanvasResult, Session

BLOCK = 256
"""Positions in a block of the KV cache."""
FORESEEN = 1024
"""New tokens for which blocks are reserved at admission, if the request may need as many."""
PASSED_BY = 8
"""How many later requests may start before one that does not fit yet."""

_log = logging.getLogger(__name__)


@dataclass
class Totals:
    """Since the scheduler was made. passes; steps: denoising steps of all requests; context: tokens that entered the cache
    (those computed again included); emitted tokens; requests by finish reason; seconds spent in passes."""

    passes: int = 0
    steps: int = 0
    context: int = 0
    emitted: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def occupancy(self) -> float:
        """Canvases a pass, on average."""
        return self.steps / max(1, self.passes)


class Job:
    """A request in a scheduler. Its events wait in `events` until they are taken."""

    def __init__(self, request: Request, number: int) -> None:
        self.request, self.number = request, number
        self.events: deque[Event] = deque()
        self.slot: int | None = None
        self.blocks = 0
        self.denoising = False
        self.passed_by = 0
        self.submitted = time.monotonic()

    @property
    def done(self) -> bool:
        """Whether the request has ended; its last events may still wait."""
        return self.request.phase is Phase.FINISHED


class Scheduler:
    """Runs requests on a session: `submit`, then `step` until nothing is left, or `stream`. Several threads may call it."""

    def __init__(self, session: Session, *, cache_positions: int | None = None) -> None:
        """Takes over every slot of the session.

        cache_positions: room in the KV cache, over all requests; None: as much as every slot could need.

        Raises:
            UserError: a cache too small for one request of the session's largest context.
        """
        limits = session.limits
        self.totals = Totals()
        self._session = session
        most = _blocks(limits.max_context)
        self._blocks = limits.max_batch * most if cache_positions is None else cache_positions // BLOCK
        if self._blocks < most:
            raise UserError(
                f"a cache of {cache_positions} positions cannot hold one request of {limits.max_context}; give at least "
                f"{most * BLOCK}, or build with a smaller --max-context"
            )
        self._free_slots = list(range(limits.max_batch))
        self._free_blocks = self._blocks
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._turns: deque[Job] = deque()
        self._submitted = 0
        self._closed = False
        self._lock = threading.RLock()

    @property
    def waiting(self) -> int:
        """Requests that have no slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return len(self._running)

    @property
    def cache_used(self) -> float:
        """Share of the KV cache's blocks that is reserved."""
        return 1 - self._free_blocks / self._blocks

    def submit(self, request: Request) -> Job:
        """Puts a request at the end of the queue.

        Raises:
            UserError: the scheduler is closed.
        """
        with self._lock:
            if self._closed:
                raise UserError("this engine is closed")
            job = Job(request, self._submitted)
            self._submitted += 1
            self._waiting.append(job)
            return job

    def stream(self, job: Job) -> Iterator[Event]:
        """The job's events as they come, running passes while it has none. Closing the iterator cancels the job."""
        try:
            while not job.done or job.events:
                if job.events:
                    yield job.events.popleft()
                else:
                    self.step(job)
        finally:
            self.cancel(job)

    def cancel(self, job: Job) -> None:
        """Ends a job at once, freeing its slot; nothing happens if it has ended."""
        with self._lock:
            if not job.done:
                self._finish(job, [job.request.end("cancelled")])

    def close(self) -> None:
        """Cancels every job and takes no more."""
        with self._lock:
            self._closed = True
            for job in [*self._running, *self._waiting]:
                self.cancel(job)

    def step(self, until: Job | None = None) -> bool:
        """One pass; False if there was nothing to run, or `until` has ended or has events (another thread may have run it)."""
        with self._lock:
            if until is not None and (until.done or until.events):
                return False
            self._admit()
            jobs = self._choose()
            if not jobs:
                assert not self._running and not self._waiting, "jobs that can never run"
                return False
            started = time.monotonic()
            try:
                self._pass(jobs)
            except Exception as error:
                _log.exception("a pass failed; the requests in it end")
                for job in jobs:
                    self._finish(job, [job.request.end("error", f"a pass failed: {type(error).__name__}: {error}")])
            except BaseException:
                # What the pass has written to the caches is unknown.
                for job in jobs:
                    self.cancel(job)
                raise
            self.totals.passes += 1
            self.totals.seconds += time.monotonic() - started
            return True

    def _admit(self) -> None:
        """Gives slots and blocks to waiting jobs, in order; a later one passes by only as long as nobody starves."""
        skipped: list[Job] = []
        for job in list(self._waiting):
            if not self._free_slots:
                break
            blocks = self._foreseen(job.request)
            if blocks > self._free_blocks:
                skipped.append(job)
                if job.passed_by >= PASSED_BY:
                    break
                continue
            for earlier in skipped:
                earlier.passed_by += 1
            self._waiting.remove(job)
            self._start(job, blocks)
            if any(earlier.passed_by >= PASSED_BY for earlier in skipped):
                break

    def _start(self, job: Job, blocks: int) -> None:
        job.slot = self._free_slots.pop(0)
        job.blocks, self._free_blocks = blocks, self._free_blocks - blocks
        self._running.append(job)
        self._running.sort(key=lambda each: each.number)
        self._turns.append(job)
        if job.request.statistics.seconds_to_start is None:
            job.request.statistics.seconds_to_start = time.monotonic() - job.submitted

    def _foreseen(self, request: Request) -> int:
        # The last canvas never enters the cache, but which one is the last is not known.
        foreseen = request.context_length + min(request.most_left, FORESEEN)
        return _blocks(min(foreseen, self._session.limits.max_context))

    def _choose(self) -> list[Job]:
        """The jobs of the next pass: all that denoise, and prompts in turns within one chunk; oldest first get blocks."""
        fed: set[Job] = set()
        left = self._session.limits.prefill_chunk
        for job in self._turns:
            if not fed or job.request.next_context <= left:
                fed.add(job)
                left -= job.request.next_context
        chosen = []
        for job in list(self._running):
            if job.slot is not None and (job.denoising or job in fed) and self._has_blocks(job):
                chosen.append(job)
        return [job for job in chosen if job.slot is not None]

    def _has_blocks(self, job: Job) -> bool:
        """Reserves what the job's cache needs after the next pass, preempting younger ones; False: not now."""
        missing = _blocks(job.request.cached + job.request.next_context) - job.blocks
        while missing > self._free_blocks:
            younger = [other for other in self._running if other.number > job.number and other.request.between_canvases]
            if younger:
                self._preempt(younger[-1])
                continue
            if job is self._running[-1] and len(self._running) > 1:
                self._preempt(job)
            return False
        if missing > 0:
            job.blocks, self._free_blocks = job.blocks + missing, self._free_blocks - missing
        return True

    def _preempt(self, job: Job) -> None:
        job.request.compute_again()
        self.totals.preemptions += 1
        self._release(job)
        self._waiting.appendleft(job)

    def _pass(self, jobs: list[Job]) -> None:
        rows = [job.request.next_rows(_slot(job)) for job in jobs]
        context = [piece for piece, _ in rows if piece is not None]
        results = iter(self._session.run(context, [canvas for _, canvas in rows if canvas is not None]))
        self.totals.context += sum(len(piece.ids) for piece in context)
        for job, (_, canvas) in zip(jobs, rows, strict=True):
            result = None if canvas is None else next(results)
            self._take(job, result)

    def _take(self, job: Job, result: CanvasResult | None) -> None:
        if job in self._turns:
            self._turns.remove(job)
            if result is None:
                self._turns.append(job)
        if result is not None:
            job.denoising = True
            self.totals.steps += 1
        events = job.request.take(result)
        statistics = job.request.statistics
        if statistics.seconds_to_first_canvas is None and any(isinstance(event, Committed) for event in events):
            statistics.seconds_to_first_canvas = time.monotonic() - job.submitted
        if job.done:
            self._finish(job, events)
        else:
            job.events.extend(events)

    def _finish(self, job: Job, events: list[Event]) -> None:
        """After the request's own end: frees what the job holds and tells its last events."""
        job.request.statistics.seconds = time.monotonic() - job.submitted
        self.totals.emitted += job.request.statistics.emitted
        end = events[-1]
        assert isinstance(end, End)
        self.totals.finished[end.finish_reason] = self.totals.finished.get(end.finish_reason, 0) + 1
        if job.slot is None:
            self._waiting.remove(job)
        else:
            self._release(job)
        job.events.extend(events)

    def _release(self, job: Job) -> None:
        slot = _slot(job)
        self._session.reset(slot)
        self._free_slots.append(slot)
        self._free_blocks += job.blocks
        self._running.remove(job)
        if job in self._turns:
            self._turns.remove(job)
        job.slot, job.blocks, job.denoising = None, 0, False


def _slot(job: Job) -> int:
    assert job.slot is not None
    return job.slot


def _blocks(positions: int) -> int:
    return -(-positions // BLOCK)
