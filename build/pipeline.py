"""From a checkpoint to an engine directory: emit the network, compile it for each target, write everything down."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dgemma_trt.build import targets
from dgemma_trt.build.compile import compile_engine
from dgemma_trt.build.fingerprint import fingerprint
from dgemma_trt.build.layers import TensorSpec
from dgemma_trt.build.network import NetworkOptions, emit
from dgemma_trt.checkpoint import Checkpoint
from dgemma_trt.config import read_json
from dgemma_trt.engine_directory import Manifest, StoredWeights, copy_text_files, write_manifest, write_weights
from dgemma_trt.errors import UserError
from dgemma_trt.files import new_folder
from dgemma_trt.text import Text
from dgemma_trt.weights import linear_shapes

LOWERINGS = {"attention": "iattention", "experts": "dense", "head": "native"}


@dataclass(frozen=True)
class BuildReport:
    """What was built: layers of the network, bytes of each engine by target, bytes of the weights, precisions in use."""

    layers: int
    engine_bytes: dict[str, int]
    weight_bytes: int
    precisions: list[str]
    warnings: list[str]


def build_engine(
    checkpoint: Checkpoint,
    target_names: Sequence[str],
    out: Path,
    options: NetworkOptions,
    *,
    replace: bool,
    progress: Callable[[str], None],
) -> BuildReport:
    """Builds an engine directory with one engine a target.

    progress is told what is being done.

    Raises:
        UserError: an unknown target, a precision that it cannot run, `out` cannot be written, limits the model does not have,
            no TensorRT for RTX, or a network that it does not compile.
    """
    precisions = {name: checkpoint.precision(name) for name, _ in linear_shapes(checkpoint.config)}
    chosen = targets.check(set(precisions.values()), target_names)
    if options.max_context > checkpoint.config.max_positions:
        raise UserError(f"--max-context is {options.max_context}, the model has {checkpoint.config.max_positions} positions")
    for option, value in (("--canvas-length", options.canvas_length), ("--prefill-chunk", options.prefill_chunk)):
        if value > options.max_context:
            raise UserError(f"{option} is {value}, beyond --max-context {options.max_context}")
    Text(checkpoint.folder)
    trt = _tensorrt()
    with new_folder(out, replace=replace, source=checkpoint.folder) as folder:
        write_weights(checkpoint, folder, lambda group: progress(f"writing weights: {group}"))
        copy_text_files(checkpoint.folder, folder)
        progress("emitting the network")
        # From what was just written, where experts are stacked: a checkpoint would stack them once more.
        emitted = emit(StoredWeights(folder, checkpoint.config, precisions), options, trt)
        engines = {}
        for target in chosen:
            progress(f"compiling for {target.name}")
            engines[target.name] = f"{target.name}.engine"
            compile_engine(emitted, target, folder / engines[target.name], progress)
        generation = checkpoint.folder / "generation_config.json"
        manifest = Manifest(
            name=out.name,
            model=read_json(checkpoint.folder / "config.json"),
            generation=read_json(generation) if generation.exists() else {},
            limits={
                "max_batch": options.max_batch,
                "max_context": options.max_context,
                "prefill_chunk": options.prefill_chunk,
                "canvas_length": options.canvas_length,
            },
            window_rule=options.window_rule,
            precisions={name: str(precision) for name, precision in precisions.items()},
            engines=engines,
            lowerings=LOWERINGS,
            inputs=[_described(spec) for spec in emitted.inputs],
            outputs=[_described(spec) for spec in emitted.outputs],
            network_fingerprint=fingerprint(emitted),
            embedded_weights=options.embed_weights,
            built_with={
                "dgemma-trt": metadata.version("dgemma-trt"),
                "tensorrt_rtx": trt.__version__,
                "torch": torch.__version__,
            },
        )
        progress("digesting")
        write_manifest(manifest, folder)
        sizes = manifest.files
        return BuildReport(
            layers=emitted.network.num_layers,
            engine_bytes={target: sizes[file]["bytes"] for target, file in engines.items()},
            weight_bytes=sum(entry["bytes"] for name, entry in sizes.items() if name.startswith("weights/")),
            precisions=sorted(set(manifest.precisions.values())),
            warnings=emitted.log.warnings,
        )


def _tensorrt() -> Any:
    try:
        return importlib.import_module("tensorrt_rtx")
    except ImportError as error:
        raise UserError(f"TensorRT for RTX cannot be loaded ({error}); install it: pip install tensorrt-rtx-cu13") from None


def _described(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "dtype": spec.dtype,
        "minimum": list(spec.minimum),
        "optimum": list(spec.optimum),
        "maximum": list(spec.maximum),
    }
