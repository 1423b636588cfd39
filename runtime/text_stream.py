"""Turns tokens that arrive canvas by canvas into text, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """Gives out text as soon as it is certain.

    Held back are half a multi-byte character and what may become a stop string. The stop string that is complete first ends the
    text before it, so the answer does not depend on how the tokens were cut into canvases.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        self._given = 0

    def add(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """The text that became certain with these tokens; with `last`, all that is left."""
        self._ids.extend(token_ids)
        text = self._decode(self._ids)
        if self._stop and (end := self._end(text)) is not None:
            self.stopped = True
            certain = text[:end]
        elif last:
            certain = text
        else:
            # Decoders write an unfinished multi-byte character as U+FFFD.
            whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
            certain = whole[: len(whole) - self._beginning(whole)]
        new, self._given = certain[self._given :], max(self._given, len(certain))
        return new

    def tokens_before_stop(self, token_ids: Sequence[int]) -> int:
        """How many of `token_ids`, added last, it takes to complete the stop string that was found."""
        before = len(self._ids) - len(token_ids)
        return next(n for n in range(1, len(token_ids) + 1) if self._end(self._decode(self._ids[: before + n])) is not None)

    def _end(self, text: str) -> int | None:
        """Where the stop string that is complete first begins; of several complete at once, the longest."""
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        lengths = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return max(lengths, default=0)
