"""Writes what ModelOpt quantized as a checkpoint folder in its unified format, and checks every matmul of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from torch import Tensor

from dgemma_trt.checkpoint import VISION, Checkpoint
from dgemma_trt.config import read_json
from dgemma_trt.errors import UserError
from dgemma_trt.formats import NVFP4_MAX
from dgemma_trt.quantize.calibration import InputRange
from dgemma_trt.quantize.recipes import Recipe
from dgemma_trt.weights import Precision, linear_shapes

if TYPE_CHECKING:
    from transformers import DiffusionGemmaForBlockDiffusion

BESIDE_THE_WEIGHTS = (".json", ".jinja", ".model", ".txt")
"""Suffixes of the files that go along: tokenizer, chat template, generation config, image processor."""
WEIGHTS_OWN = ("config.json", "hf_quant_config.json", "model.safetensors.index.json")


def export(model: DiffusionGemmaForBlockDiffusion, source: Checkpoint, out: Path) -> None:
    """Writes `model`, quantized, into the folder `out`, with everything of `source` that is not a language weight.

    Vision tensors are copied as they are. config.json keeps every field of the original beside `quantization_config`.
    """
    from modelopt.torch.export import export_hf_checkpoint

    vision = _vision_tensors(source.folder)
    export_hf_checkpoint(model, export_dir=out, extra_state_dict=vision)
    quantization = read_json(out / "config.json")["quantization_config"]
    described = read_json(out / "hf_quant_config.json")
    if vision:
        excluded = [f"model.encoder.{part}*" for part in ("embed_vision", "vision_tower")]
        for modules in (quantization["ignore"], described["quantization"]["exclude_modules"]):
            modules[:] = sorted({*modules, *excluded})
    _write_json(out / "hf_quant_config.json", described)
    _write_json(out / "config.json", {**read_json(source.folder / "config.json"), "quantization_config": quantization})
    (out / "generation_config.json").unlink(missing_ok=True)
    for file in sorted(source.folder.iterdir()):
        if file.is_file() and file.suffix in BESIDE_THE_WEIGHTS and file.name not in WEIGHTS_OWN:
            shutil.copyfile(file, out / file.name)
    _make_readable(out)


def verify(out: Path, recipe: Recipe, ranges: Mapping[str, InputRange]) -> Checkpoint:
    """Opens the written folder and checks that every matmul is what the recipe says, its scales usable.

    Args:
        out: the folder.
        recipe: what was asked for.
        ranges: what calibration saw of each quantized matmul's input; empty for a recipe without calibration.

    Returns:
        The folder, opened.

    Raises:
        UserError: a layer left unquantized (fused experts above all), a scale that is zero or not finite, or an input scale
            that does not cover what both modes need.
    """
    written = Checkpoint(out)
    for name, _ in linear_shapes(written.config):
        expected = recipe.precision if recipe.covers(name) else Precision.BF16
        if written.precision(name) is not expected:
            raise UserError(
                f"ModelOpt left {name} in {written.precision(name)}, but {recipe.name} wants {expected} there; nothing was "
                "written. Install the versions of nvidia-modelopt and transformers that constraints.txt names"
            )
        linear = written.linear(name)
        scales = [scale for suffix, scale in linear.tensors().items() if suffix != "weight"]
        if not all((scale.float() > 0).all() and scale.float().isfinite().all() for scale in scales):
            raise UserError(f"ModelOpt wrote a scale of {name} that is zero or not finite; nothing was written")
        if name in ranges and linear.input_scale is not None:
            covered = linear.input_scale.min().item() * NVFP4_MAX
            if covered < ranges[name].merged * (1 - 1e-6):
                raise UserError(
                    f"ModelOpt's input scale of {name} covers {covered:.4g}, but the encoder's inputs reach "
                    f"{ranges[name].encoder:.4g} and the decoder's {ranges[name].decoder:.4g}; nothing was written. Install "
                    "the version of nvidia-modelopt that constraints.txt names"
                )
    return written


def _vision_tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for key in handle.keys():  # noqa: SIM118 (not a dict)
                if key.removeprefix("model.").removeprefix("encoder.").startswith(VISION):
                    found[key] = handle.get_tensor(key)
    return found


def _make_readable(folder: Path) -> None:
    """Gives files the permissions of any other: safetensors writes for their owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
