"""A thread that runs a scheduler, for servers: nobody who submits or cancels a request waits for a pass."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dgemma_trt.errors import UserError
from dgemma_trt.runtime.diffusion import Request
from dgemma_trt.runtime.events import End, Event
from dgemma_trt.runtime.scheduler import Job, Scheduler

Tell = Callable[[Event], None]
"""Takes one event of a request, in the worker's thread: it must not block."""

_log = logging.getLogger(__name__)


class Overloaded(UserError):
    """As many requests wait as the worker allows."""


@dataclass(eq=False)
class Ticket:
    """A request given to a worker."""

    request: Request
    tell: Tell
    job: Job | None = None
    cancelled: bool = False


class Worker:
    """Owns a scheduler: what is submitted and cancelled takes effect between two passes."""

    def __init__(self, scheduler: Scheduler, *, max_waiting: int | None = None) -> None:
        """Starts the thread. max_waiting: requests that may wait for a slot; None: any number."""
        self.scheduler, self._max_waiting = scheduler, max_waiting
        self._changed = threading.Condition()
        self._arrived: deque[Ticket] = deque()
        self._open: list[Ticket] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="dgemma-trt passes", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether passes can run."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Requests that have no slot."""
        return len(self._arrived) + self.scheduler.waiting

    def submit(self, request: Request, tell: Tell) -> Ticket:
        """Queues a request; `tell` gets each of its events, an End as the last.

        Raises:
            Overloaded: too many wait already.
            UserError: the worker is closed.
        """
        ticket = Ticket(request, tell)
        with self._changed:
            if self._closing or not self.alive:
                raise UserError("this engine is closed")
            if self._max_waiting is not None and self.waiting >= self._max_waiting:
                raise Overloaded(f"{self.waiting} requests wait already; try again later")
            self._arrived.append(ticket)
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request before the next pass; its End says `cancelled`, unless it has ended already."""
        with self._changed:
            ticket.cancelled = True
            self._changed.notify()

    def close(self) -> None:
        """Cancels every request and waits for the thread to end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_in():
                self.scheduler.step()
                self._tell_all()
        finally:
            with self._changed:
                self._closing = True
            self.scheduler.close()
            self._tell_all()
            for ticket in self._arrived:
                self._tell(ticket, End("cancelled"))

    def _take_in(self) -> bool:
        """Waits until there is something to do, and takes in what came; False: to close."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._arrived or self._open)
            if self._closing:
                return False
            while self._arrived:
                ticket = self._arrived.popleft()
                ticket.job = self.scheduler.submit(ticket.request)
                self._open.append(ticket)
        for ticket in self._open:
            if ticket.cancelled and ticket.job is not None:
                self.scheduler.cancel(ticket.job)
        self._tell_all()
        return True

    def _tell_all(self) -> None:
        for ticket in list(self._open):
            assert ticket.job is not None
            while ticket.job.events:
                self._tell(ticket, ticket.job.events.popleft())
            if ticket.job.done:
                self._open.remove(ticket)

    def _tell(self, ticket: Ticket, event: Event) -> None:
        try:
            ticket.tell(event)
        except Exception:
            _log.exception("a request's listener failed; the request is cancelled")
            ticket.cancelled, ticket.tell = True, _nobody


def _nobody(_: Event) -> None:
    """For events of a request whose listener failed."""
