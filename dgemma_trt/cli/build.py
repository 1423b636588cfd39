"""`dgemma-trt build`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("checkpoint")
@click.option("--target", required=True, help="GPU architectures, comma-separated: sm80, sm86, sm89, sm120, sm121.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Engine directory to write.")
@click.option("--max-batch", type=click.IntRange(1, 1024), default=8, show_default=True, help="Requests that share a pass.")
@click.option(
    "--max-context",
    type=click.IntRange(2),
    help="Positions of a request, answer included.  [default: 8192, or what the model has]",
)
@click.option("--prefill-chunk", type=click.IntRange(1), help="Prompt tokens in one pass.  [default: 512, or --max-context]")
@click.option("--canvas-length", type=click.IntRange(1), help="Tokens of a canvas.  [default: the model's]")
@click.option("--window-rule", type=click.Choice(["reference", "per-token"]), default="reference", show_default=True,
              help="What a canvas sees of the context on sliding layers: as transformers, or as vLLM.")  # fmt: skip
@click.option("--weights", type=click.Choice(["inputs", "embedded"]), default="inputs", show_default=True,
              help="Bind the weights at run time, or make them constants of the engine.")  # fmt: skip
@click.option("--debug-logits", is_flag=True, help="Give the engine an output `logits`.")
@click.option("--top-logprobs", is_flag=True, help="Give the engine outputs `top_ids` and `top_logprobs`, 20 a position.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def command(
    checkpoint: str,
    target: str,
    out: Path,
    max_batch: int,
    max_context: int | None,
    prefill_chunk: int | None,
    canvas_length: int | None,
    window_rule: str,
    weights: str,
    debug_logits: bool,
    top_logprobs: bool,
    force: bool,
) -> None:
    """Compile CHECKPOINT with TensorRT for RTX into an engine directory; no GPU is needed.

    CHECKPOINT is a folder (bf16, or quantized by ModelOpt), a Hugging Face id, or `nano`.
    """
    from rich.console import Console

    from dgemma_trt.build.network import NetworkOptions
    from dgemma_trt.build.pipeline import build_engine
    from dgemma_trt.checkpoint import Checkpoint
    from dgemma_trt.sources import find_checkpoint

    opened = Checkpoint(find_checkpoint(checkpoint))
    for note in opened.notes:
        click.echo(note, err=True)
    max_context = max_context or min(8192, opened.config.max_positions)
    options = NetworkOptions(
        max_batch=max_batch,
        max_context=max_context,
        prefill_chunk=prefill_chunk or min(512, max_context),
        canvas_length=canvas_length or opened.config.canvas_length,
        window_rule="per-token" if window_rule == "per-token" else "reference",
        top_logprobs=top_logprobs,
        debug_logits=debug_logits,
        embed_weights=weights == "embedded",
    )
    targets = [name.strip() for name in target.split(",") if name.strip()]
    with Console(stderr=True).status("starting …") as status:
        report = build_engine(opened, targets, out, options, replace=force, progress=status.update)
    engines = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in report.engine_bytes.items())
    click.echo(
        f"{out}: {report.layers} TensorRT layers, precisions {', '.join(report.precisions)}; engines {engines}; "
        f"weights {report.weight_bytes / 1e6:.1f} MB"
    )
