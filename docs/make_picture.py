"""Records docs/watch.svg: the frames that `dgemma-trt run --watch` shows, one under the other.

python docs/make_picture.py engines/nano-nvfp4-sm120
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from dgemma_trt import Engine
from dgemma_trt.cli.watch import frame
from dgemma_trt.runtime.events import Committed, Draft

QUESTION = "Spell neutron backwards."


def main(path: str) -> None:
    """Runs the question once and writes the picture beside this file."""
    engine = Engine.open(path, "cpu")
    console = Console(record=True, width=104, height=60, force_terminal=True, file=io.StringIO())
    steps = engine.source.generation_config.max_denoising_steps
    console.print(f"$ dgemma-trt run --engine {path} --prompt '{QUESTION}' --watch", highlight=False)
    text = Text()
    for event in engine.stream(QUESTION):
        if isinstance(event, Draft):
            console.print(frame(text, event, engine.text.decode, steps, console))
        elif isinstance(event, Committed):
            text.append(event.text)
    console.print(Panel(text, border_style="green"))
    console.save_svg(str(Path(__file__).with_name("watch.svg")), title="dgemma-trt run --watch")


if __name__ == "__main__":
    main(sys.argv[1])
