"""`dgemma-trt run`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from dgemma_trt.errors import UserError

if TYPE_CHECKING:
    from dgemma_trt.engine import Engine, Generation


@click.command()
@click.option("--engine", "path", required=True, help="Engine directory, or a checkpoint: folder, Hugging Face id or `nano`.")
@click.option("--prompt", "prompts", multiple=True, help="Question; may be repeated. `-`, or none, reads standard input.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it stands, without the chat template.")
@click.option("--watch", is_flag=True, help="Show the canvas resolving.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt.")
@click.option("--max-new-tokens", type=click.IntRange(1), help="Exact limit.  [default: up to the context limit]")
@click.option("--max-denoising-steps", type=click.IntRange(1), help="Steps a canvas at most.  [default: the checkpoint's]")
@click.option("--entropy-bound", type=float, help="Nats of entropy accepted at a step.  [default: the checkpoint's]")
@click.option("--temperature", type=float, help="1: the checkpoint's schedule; 0: argmax; else a factor of it.")
@click.option("--stop", multiple=True, help="String that ends the answer, which then ends before it; may be repeated.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def command(path: str, prompts: tuple[str, ...], raw: bool, watch: bool, as_json: bool, device: str, **parameters: Any) -> None:
    """Answer a prompt through the diffusion loop."""
    if watch and (as_json or len(prompts) > 1):
        raise click.UsageError("--watch shows one prompt and prints text; leave out --json and further prompts")
    if prompts.count("-") > 1:
        raise click.UsageError("--prompt - reads standard input, which can be read once")
    asked = [_standard_input() if prompt == "-" else prompt for prompt in prompts or ("-",)]

    from dgemma_trt.engine import Engine

    engine = Engine.open(path, device)
    for note in getattr(engine.source, "notes", []):
        click.echo(note, err=True)
    where = "no GPU was found: " if engine.device == "cpu" and device == "auto" else ""
    click.echo(f"{where}running on the host session (torch, {engine.device}), on the weights of {path}", err=True)
    if watch:
        _watch(engine, asked[0], raw, parameters)
        return
    failed = False
    answers = engine.generate(asked, raw=raw, **parameters)
    for prompt, answer in zip(asked, answers, strict=True):
        click.echo(json.dumps(_as_dict(prompt, answer), ensure_ascii=False) if as_json else answer.text)
        if answer.error:
            click.echo(f"Error: {answer.error}", err=True)
            failed = True
    if failed:
        sys.exit(1)


def _standard_input() -> str:
    if sys.stdin is None:
        raise UserError("standard input is closed; give --prompt")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 text: {error}") from None


def _watch(engine: Engine, prompt: str, raw: bool, parameters: dict[str, Any]) -> None:
    from rich.console import Console

    from dgemma_trt.cli.watch import show
    from dgemma_trt.runtime.events import End

    steps = parameters["max_denoising_steps"] or engine.source.generation_config.max_denoising_steps
    end = show(engine.stream(prompt, raw=raw, **parameters), engine.text.decode, steps, Console())
    if isinstance(end, End) and end.error:
        click.echo(f"Error: {end.error}", err=True)
        sys.exit(1)


def _as_dict(prompt: str, answer: Generation) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "token_ids": answer.token_ids,
        "steps": answer.statistics.steps,
        "converged": [canvas.converged for canvas in answer.canvases],
        "tokens_per_forward": round(answer.statistics.tokens_per_forward, 3),
        "error": answer.error,
    }
