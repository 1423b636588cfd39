"""`dgemma-trt quantize`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("checkpoint")
@click.option("--quant", type=click.Choice(["fp8", "nvfp4"]), required=True, help="Recipe; fp8 rounds activations per token.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def command(checkpoint: str, quant: str, out: Path, force: bool) -> None:
    """Quantize CHECKPOINT with NVIDIA ModelOpt, calibrated by the diffusion loop.

    CHECKPOINT is a folder, a Hugging Face id, or `nano`, the small one that comes with this program.
    """
    from rich.console import Console

    from dgemma_trt.quantize import quantize_checkpoint
    from dgemma_trt.sources import find_checkpoint

    console = Console(stderr=True)
    with console.status("starting …") as status:
        report = quantize_checkpoint(
            find_checkpoint(checkpoint), quant, out, replace=force, progress=lambda what: status.update(what)
        )
    Console().print(report.table())
    click.echo(f"{out}: {report.bits_per_weight:.2f} bits per weight")
