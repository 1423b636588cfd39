"""Shows a canvas resolving in the terminal, denoising step by step."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from dgemma_trt.runtime.events import Committed, Draft, End, Event
from dgemma_trt.runtime.text_stream import Decode

CERTAIN, GUESS = 0.05, 1.0
"""Entropy in nats below which a token counts as certain, and above which it is a mere guess."""


def show(events: Iterable[Event], decode: Decode, max_steps: int, console: Console) -> End | None:
    """Draws the drafts of one request as they come, leaves its text on the screen, and returns its end.

    On a terminal the canvas is redrawn in place; otherwise each denoising step is one line.
    """
    redraws = console.is_terminal and not console.is_dumb_terminal
    return (_show_live if redraws else _show_lines)(events, decode, max_steps, console)


def _show_live(events: Iterable[Event], decode: Decode, max_steps: int, console: Console) -> End | None:
    done, end = Text(), None
    with Live(console=console, refresh_per_second=20, transient=True) as live:
        for event in events:
            if isinstance(event, Draft):
                live.update(frame(done, event, decode, max_steps, console))
            elif isinstance(event, Committed):
                done.append(event.text)
            else:
                end = event
    if end is not None:
        console.print(Panel(done, border_style="green"))
    return end


def frame(done: Text, draft: Draft, decode: Decode, max_steps: int, console: Console) -> Panel:
    """One denoising step: the text so far, the canvas with its settled and unsettled tokens, the figures below.

    Of text that is taller than the console, the last lines.
    """
    canvas = Text()
    for token, accepted, entropy in _tokens(draft):
        canvas.append(_printable(decode([token])), style=_style(accepted, entropy))
    width = max(1, console.width - 4)
    caption = Text(_caption(draft, max_steps), style="dim").wrap(console, width)
    lines = (done + canvas).wrap(console, width)
    height = max(1, console.height - 2)
    shown = [*lines[-max(1, height - len(caption)) :], *caption][:height]
    return Panel(Group(*shown), border_style="dim")


def _show_lines(events: Iterable[Event], decode: Decode, max_steps: int, console: Console) -> End | None:
    end, text = None, ""
    for event in events:
        if isinstance(event, Draft):
            canvas = "".join(_printable(decode([token])) if accepted else "·" for token, accepted, _ in _tokens(event))
            console.out(f"{_caption(event, max_steps)}  {canvas}".replace("\n", "⏎"), highlight=False)
        elif isinstance(event, Committed):
            text += event.text
        else:
            end = event
    console.out(text, highlight=False)
    return end


def _tokens(draft: Draft) -> Iterable[tuple[int, bool, float]]:
    return zip(draft.token_ids, draft.accepted.tolist(), draft.entropy.tolist(), strict=True)


def _caption(draft: Draft, max_steps: int) -> str:
    return (
        f"canvas {draft.canvas + 1}, step {draft.step:2d} of at most {max_steps}: {int(draft.accepted.sum()):3d} of "
        f"{len(draft.token_ids)} settled, mean entropy {draft.mean_entropy:.4f}"
    )


def _style(accepted: bool, entropy: float) -> str:
    if accepted:
        return "bold green" if entropy < CERTAIN else "green"
    return "yellow" if entropy < GUESS else "bright_black"


def _printable(text: str) -> str:
    return "".join(c if c == "\n" or c.isprintable() else "▯" for c in text)
