"""Shows a canvas resolving in the terminal, denoising step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from dgemma_trt.runtime.diffusion import Committed, Draft, Event

CERTAIN, GUESS = 0.05, 1.0
"""Entropy in nats below which a token counts as certain, and above which it is a mere guess."""


def show(events: Iterable[Event], decode: Callable[[Sequence[int]], str], max_steps: int, console: Console) -> None:
    """Draws the drafts of one request as they come, and leaves its text on the screen.

    On a terminal the canvas is redrawn in place; otherwise each denoising step is one line.
    """
    if console.is_terminal:
        _show_live(events, decode, max_steps, console)
    else:
        _show_lines(events, decode, max_steps, console)


def _show_live(events: Iterable[Event], decode: Callable[[Sequence[int]], str], max_steps: int, console: Console) -> None:
    done = Text()
    with Live(console=console, refresh_per_second=20, transient=False) as live:
        for event in events:
            if isinstance(event, Draft):
                canvas = Text()
                for token, accepted, entropy in _tokens(event):
                    canvas.append(_printable(decode([token])), style=_style(accepted, entropy))
                live.update(Panel(Group(done + canvas, Text(_caption(event, max_steps), style="dim")), border_style="dim"))
            elif isinstance(event, Committed):
                done.append(decode(event.token_ids))
                live.update(Panel(done, border_style="green"))


def _show_lines(events: Iterable[Event], decode: Callable[[Sequence[int]], str], max_steps: int, console: Console) -> None:
    for event in events:
        if isinstance(event, Draft):
            canvas = "".join(_printable(decode([token])) if accepted else "·" for token, accepted, _ in _tokens(event)).replace(
                "\n", "⏎"
            )
            console.out(f"{_caption(event, max_steps)}  {canvas}", highlight=False)
        elif isinstance(event, Committed):
            console.out(decode(event.token_ids), highlight=False)


def _tokens(draft: Draft) -> Iterable[tuple[int, bool, float]]:
    return zip(draft.token_ids, draft.accepted.tolist(), draft.entropy.tolist(), strict=True)


def _caption(draft: Draft, max_steps: int) -> str:
    accepted = int(draft.accepted.sum())
    return (
        f"canvas {draft.canvas + 1}, step {draft.step:2d} of at most {max_steps}: {accepted:3d} of {len(draft.token_ids)} "
        f"tokens settled, mean entropy {draft.mean_entropy:.4f}"
    )


def _style(accepted: bool, entropy: float) -> str:
    if accepted:
        return "bold green" if entropy < CERTAIN else "green"
    return "yellow" if entropy < GUESS else "bright_black"


def _printable(text: str) -> str:
    return "".join(c if c == "\n" or c.isprintable() else "▯" for c in text)
