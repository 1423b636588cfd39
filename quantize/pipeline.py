"""From a bf16 checkpoint to a quantized one, both folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dgemma_trt.checkpoint import Checkpoint
from dgemma_trt.errors import UserError
from dgemma_trt.files import new_folder
from dgemma_trt.formats import BLOCK
from dgemma_trt.quantize.calibration import Coverage, InputRange, calibrate, input_ranges
from dgemma_trt.quantize.export import export, verify
from dgemma_trt.quantize.libraries import aloud, quiet_libraries
from dgemma_trt.quantize.prompts import tokenized_chats
from dgemma_trt.quantize.recipes import Recipe, find_recipe
from dgemma_trt.quantize.reference import reference_model
from dgemma_trt.quantize.report import QuantizationReport, report_on
from dgemma_trt.weights import Precision, linear_shapes


def _silent(_: str) -> None:
    pass


def quantize_checkpoint(
    checkpoint: Path, quant: str, out: Path, *, replace: bool = False, progress: Callable[[str], None] = _silent
) -> QuantizationReport:
    """Quantizes a checkpoint folder with NVIDIA ModelOpt and writes the result, whole or not at all.

    Args:
        checkpoint: folder of a bf16 DiffusionGemma; its vision weights, if any, are copied as they are.
        quant: a recipe's name, see `RECIPES`.
        out: folder to write, in ModelOpt's unified format, with tokenizer and chat template.
        replace: whether an `out` that exists is replaced.
        progress: called with a few words at each stage.

    Raises:
        UserError: bad input, an `out` that cannot be written, missing libraries, or a result that is not what the recipe
            says.
    """
    recipe = find_recipe(quant)
    source = Checkpoint(checkpoint)
    _refuse_unsuitable(source, recipe)
    with new_folder(out, replace=replace, source=checkpoint) as folder:
        spoken = aloud(progress)
        spoken("loading NVIDIA ModelOpt")
        with quiet_libraries():
            ranges, coverage = _quantize(source, recipe, folder, spoken)
        spoken("verifying")
        written = verify(folder, recipe, ranges)
        return report_on(quant, source, written, ranges, coverage)


def _refuse_unsuitable(source: Checkpoint, recipe: Recipe) -> None:
    for name, shape in linear_shapes(source.config):
        if source.precision(name) is not Precision.BF16:
            raise UserError(
                f"{source.folder}: {name} is {source.precision(name)} already; give the bf16 checkpoint it was made from"
            )
        if recipe.precision is Precision.NVFP4 and recipe.covers(name) and shape[-1] % BLOCK:
            raise UserError(f"{source.folder}: {name} has {shape[-1]} inputs; NVFP4 needs a multiple of {BLOCK}")


def _quantize(
    source: Checkpoint, recipe: Recipe, folder: Path, progress: Callable[[str], None]
) -> tuple[dict[str, InputRange], Coverage | None]:
    import modelopt.torch.quantization as mtq

    prompts = tokenized_chats(source.folder) if recipe.calibrated else []
    progress("loading the checkpoint")
    model = reference_model(source)
    coverage: Coverage | None = None
    ranges: dict[str, InputRange] = {}
    if recipe.calibrated:

        def diffuse(model: Any) -> None:
            nonlocal coverage
            coverage = calibrate(model, prompts, source.config, source.generation_config, progress)

        model = mtq.quantize(model, recipe.modelopt_settings(), diffuse)
        ranges = input_ranges(model, [name for name, _ in linear_shapes(source.config) if recipe.covers(name)])
    else:
        progress("quantizing")
        model = mtq.quantize(model, recipe.modelopt_settings())
    progress("writing")
    export(model, source, folder)
    return ranges, coverage
