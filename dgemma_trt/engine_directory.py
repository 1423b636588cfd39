"""The engine directory: manifest.json, one engine file a target, the weights, and the text files.

Everything in it is listed in the manifest with size and sha256, and the manifest holds its own; opening checks that. The
weights are safetensors, one file for each layer and one for the rest, in the names of dgemma_trt/weights.py and the very
shapes the engines read.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dgemma_trt import text
from dgemma_trt.checkpoint import Checkpoint
from dgemma_trt.config import GenerationConfig, ModelConfig, WindowRule, read_json
from dgemma_trt.errors import UserError
from dgemma_trt.files import sha256
from dgemma_trt.weights import PARTS, Linear, Precision, linear_shapes, tensor_shapes

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
WEIGHTS = "weights"
AGAIN = "build the engine again"
LIMITS = ("max_batch", "max_context", "prefill_chunk", "canvas_length")


@dataclass
class Manifest:
    """What manifest.json says. `model` and `generation` are the checkpoint's own config files.

    precisions: matmul name -> precision. engines: target -> file. inputs, outputs: name, dtype, minimum, optimum and maximum
    shape of every tensor the engines take and give. files: path -> {"sha256", "bytes"}, for everything but the manifest.
    digest: sha256 of all other fields.
    """

    name: str
    model: dict[str, Any]
    generation: dict[str, Any]
    limits: dict[str, int]
    window_rule: WindowRule
    precisions: dict[str, str]
    engines: dict[str, str] = field(default_factory=dict)
    lowerings: dict[str, str] = field(default_factory=dict)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    network_fingerprint: str = ""
    embedded_weights: bool = False
    built_with: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    digest: str = ""

    def digest_of_the_rest(self) -> str:
        """What `digest` should be."""
        rest = {name: value for name, value in asdict(self).items() if name != "digest"}
        return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write_weights(checkpoint: Checkpoint, folder: Path, progress: Callable[[str], None]) -> None:
    """Writes the checkpoint's weights into `folder`/weights as engines read them, a file at a time.

    progress is told the name of each file before it is written. Memory: the largest layer, where experts must be stacked.
    """
    target = folder / WEIGHTS
    target.mkdir()
    groups: dict[str, list[str]] = defaultdict(list)
    for name, _ in (*tensor_shapes(checkpoint.config), *linear_shapes(checkpoint.config)):
        parts = name.split(".")
        groups[".".join(parts[:2]) if parts[0] == "layers" else "shared"].append(name)
    linears = {name for name, _ in linear_shapes(checkpoint.config)}
    for group, names in groups.items():
        progress(group)
        tensors: dict[str, Tensor] = {}
        for name in names:
            if name in linears:
                tensors |= {f"{name}.{part}": tensor for part, tensor in checkpoint.linear(name).tensors().items()}
            else:
                tensors[name] = checkpoint.tensor(name)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / f"{group}.safetensors")


def copy_text_files(source: Path, folder: Path) -> None:
    """Copies the tokenizer files and the chat template that `source` has."""
    for name in text.FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Lists every file of `folder` in the manifest and writes it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest.files = {str(path.relative_to(folder)): {"sha256": sha256(path), "bytes": path.stat().st_size} for path in files}
    manifest.digest = manifest.digest_of_the_rest()
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")


class StoredWeights:
    """The weights of an engine directory, memory-mapped; implements `Weights`."""

    def __init__(self, folder: Path, config: ModelConfig, precisions: Mapping[str, str]) -> None:
        """Opens what `write_weights` wrote into `folder`; precisions: as in the manifest."""
        self._config, self._precisions = config, precisions
        files = [safe_open(path, framework="pt") for path in sorted((folder / WEIGHTS).glob("*.safetensors"))]
        self._files: dict[str, Any] = {key: file for file in files for key in file.keys()}  # noqa: SIM118 (not a dict)

    @property
    def config(self) -> ModelConfig:
        """The model's sizes."""
        return self._config

    def tensor(self, name: str) -> Tensor:
        """A plain tensor, as stored."""
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def linear(self, name: str) -> Linear:
        """A matmul's weight, experts stacked."""
        parts = [part for part in PARTS if f"{name}.{part}" in self._files]
        return Linear(self.precision(name), **{part: self.tensor(f"{name}.{part}") for part in parts})

    def precision(self, name: str) -> Precision:
        """The precision of a matmul's weight."""
        return Precision(self._precisions[name])


class EngineDirectory(StoredWeights):
    """An engine directory, opened and checked."""

    def __init__(self, folder: Path) -> None:
        """Opens `folder` and checks every file against the manifest.

        Raises:
            UserError: no manifest, another format version, a file that is missing or was changed.
        """
        self.folder = folder
        self.manifest = _read_manifest(folder / MANIFEST)
        self._check_files()
        source = str(folder / MANIFEST)
        config = ModelConfig.from_dict(self.manifest.model, f"{source}: model")
        self.generation_config = GenerationConfig.from_dict(
            self.manifest.generation, self.manifest.model["text_config"].get("eos_token_id", 1), f"{source}: generation"
        )
        for name, _ in linear_shapes(config):
            if self.manifest.precisions.get(name) not in list(Precision):
                raise UserError(f"{source}: precisions.{name} is {self.manifest.precisions.get(name)!r}; {AGAIN}")
        super().__init__(folder, config, self.manifest.precisions)

    def _check_files(self) -> None:
        advice = "the engine directory is damaged: build it again"
        needed = {"tokenizer.json", *self.manifest.engines.values()}
        needed |= {f"{WEIGHTS}/{path.name}" for path in (self.folder / WEIGHTS).glob("*")}
        if unlisted := sorted(needed - self.manifest.files.keys()):
            raise UserError(f"{self.folder / MANIFEST}: files does not list {unlisted[0]}; {advice}")
        for name, expected in self.manifest.files.items():
            path = self.folder / name
            if not path.is_file():
                raise UserError(f"{path}: missing; {advice}")
            if path.stat().st_size != expected["bytes"]:
                raise UserError(f"{path}: has {path.stat().st_size} bytes, the manifest says {expected['bytes']}; {advice}")
        with ThreadPoolExecutor() as pool:
            digests = pool.map(sha256, [self.folder / name for name in self.manifest.files])
            for (name, expected), found in zip(self.manifest.files.items(), digests, strict=True):
                if found != expected["sha256"]:
                    raise UserError(f"{self.folder / name}: was changed after it was built; {advice}")


def is_engine_directory(folder: Path) -> bool:
    """True when `folder` holds a manifest."""
    return (folder / MANIFEST).is_file()


def _read_manifest(path: Path) -> Manifest:
    data = read_json(path)
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format_version is {version!r}, this program reads {FORMAT_VERSION}; {AGAIN}")
    fields = Manifest.__dataclass_fields__.keys()
    if wrong := sorted(fields ^ data.keys()):
        raise UserError(f"{path}: {wrong[0]} is {'missing' if wrong[0] in fields else 'unknown'}; {AGAIN}")
    manifest = Manifest(**data)
    for name, hint in get_type_hints(Manifest).items():
        value, kind = getattr(manifest, name), get_origin(hint) or hint
        if value not in get_args(hint) if kind is Literal else not isinstance(value, kind):
            expected = " or ".join(get_args(hint)) if kind is Literal else kind.__name__
            raise UserError(f"{path}: {name} is {value!r}, expected {expected}; {AGAIN}")
    for name in LIMITS:
        value = manifest.limits.get(name)
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{path}: limits.{name} is {value!r}, expected a whole number of at least 1; {AGAIN}")
    for name, entry in manifest.files.items():
        if not isinstance(entry, dict) or not entry.keys() >= {"sha256", "bytes"}:
            raise UserError(f"{path}: files.{name} has no sha256 or bytes; {AGAIN}")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(f"{path}: files.{name} lies outside the engine directory")
    if manifest.digest != manifest.digest_of_the_rest():
        raise UserError(f"{path}: was changed after it was built; {AGAIN}")
    return manifest
