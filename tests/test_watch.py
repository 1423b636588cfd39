"""The canvas in the terminal: what is drawn, on terminals of every kind and size."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.text import Text

from dgemma_trt.cli.watch import frame, show
from dgemma_trt.runtime.events import Committed, Draft, End, Event

LETTERS = "abcdefghij"


def decode(ids: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in ids)


def draft(canvas: int = 0, step: int = 1) -> Draft:
    accepted = torch.arange(10) < 4
    return Draft(canvas, step, list(range(10)), accepted, torch.linspace(0, 2, 10))


def events() -> Iterator[Event]:
    for canvas in range(30):
        yield draft(canvas)
        yield Committed(canvas, list(range(10)), LETTERS, [0.0] * 10, 1, True)
    yield End("stop")


def terminal(width: int, height: int, **options: Any) -> Console:
    return Console(width=width, height=height, force_terminal=True, file=io.StringIO(), **options)


def drawn(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 8), (20, 5), (5, 3)])
def test_a_frame_fits_its_terminal_and_shows_the_canvas_rather_than_the_text_before(width: int, height: int) -> None:
    console = terminal(width, height)
    console.print(frame(Text("before\n" * 100), draft(), decode, 48, console))
    lines = Text.from_ansi(drawn(console)).plain.splitlines()
    assert len(lines) == height
    if height > 3:
        assert LETTERS in "".join(lines)
    if height > 5:
        assert "mean entropy" in " ".join("".join(lines).replace("│", " ").split())


def test_the_figures_fit_one_line_of_80_columns() -> None:
    console = terminal(80, 24)
    console.print(frame(Text(), draft(9, 48), decode, 48, console))
    assert len(Text.from_ansi(drawn(console)).plain.splitlines()) == 4


def test_settled_and_open_tokens_are_told_apart() -> None:
    console = terminal(80, 24, color_system="standard")
    console.print(frame(Text(), draft(), decode, 48, console))
    styles = {letter: drawn(console).split(letter)[0].rsplit("\x1b[", 1)[1].split("m")[0] for letter in "abej"}
    assert styles == {"a": "1;32", "b": "32", "e": "33", "j": "90"}, "certain, settled, open, a guess"


def test_the_whole_text_stays_on_the_screen_when_it_is_over() -> None:
    console = terminal(30, 6)
    end = show(events(), decode, 48, console)
    assert end == End("stop")
    last = Text.from_ansi(drawn(console)).plain.rsplit("╭", 1)[1]
    assert last.count("a") == 30


def test_a_terminal_that_cannot_move_its_cursor_gets_a_line_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = terminal(80, 24)
    told: list[Event] = [draft(), draft(step=2), Committed(0, [1, 2], "bc", [0.0, 0.0], 2, True), End("stop")]
    show(told, decode, 48, console)
    lines = drawn(console).splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["canvas 1, step  1 of at most 48", "canvas 1, step  2 of at most 48"]
    assert lines[2] == "bc"
