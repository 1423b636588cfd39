"""Runs requests on a session, and turns committed tokens into text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from dgemma_trt.errors import UserError
from dgemma_trt.runtime.diffusion import Event, Phase, Request
from dgemma_trt.runtime.session import Session


def run_requests(session: Session, requests: Sequence[Request]) -> Iterator[tuple[int, Event]]:
    """Runs requests to their end, as many at a time as the session has slots; yields (index of the request, event).

    Requests in different phases share each pass. One that ends frees its slot for the next in order. Several calls may be
    under way on one session: each takes slots of its own.

    Raises:
        UserError: other calls hold every slot.
    """
    waiting = deque(range(len(requests)))
    running: dict[int, int] = {}
    try:
        while waiting or running:
            while waiting and session.free_slots:
                running[session.free_slots.pop(0)] = waiting.popleft()
            if not running:
                raise UserError(f"other open generations hold all {session.limits.max_batch} slots; finish or close one")
            rows = {slot: requests[index].next_rows(slot) for slot, index in running.items()}
            context = [chunk for chunk, _ in rows.values() if chunk is not None]
            canvases = [canvas for _, canvas in rows.values() if canvas is not None]
            results = iter(session.run(context, canvases))
            for slot, (_, canvas) in rows.items():
                index = running[slot]
                events = requests[index].take(None if canvas is None else next(results))
                if requests[index].phase is Phase.FINISHED:
                    del running[slot]
                    _free(session, slot)
                yield from ((index, event) for event in events)
    finally:
        for slot in running:
            _free(session, slot)


def _free(session: Session, slot: int) -> None:
    session.reset(slot)
    session.free_slots.append(slot)


class TextStream:
    """Turns token ids that arrive canvas by canvas into text; half a character waits for its other half."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._given = 0

    def add(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """The text that became certain with these tokens; with `last`, all that is left."""
        self._ids.extend(token_ids)
        text = self._decode(self._ids)
        # Decoders write an unfinished multi-byte character as U+FFFD.
        certain = text if last else text.rstrip("\N{REPLACEMENT CHARACTER}")
        new, self._given = certain[self._given :], max(self._given, len(certain))
        return new
