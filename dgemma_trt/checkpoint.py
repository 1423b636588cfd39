"""Opens a checkpoint folder as users bring it and gives its weights under one set of names.

Reads one safetensors file or shards, memory-mapped; either key prefix; experts fused or one by one; bf16 and ModelOpt's
FP8 and NVFP4, mixed in one file. What a tensor is follows from the file, not from lists in its config. Everything that
can be checked without reading weights is checked on opening.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dgemma_trt.config import GenerationConfig, ModelConfig, read_json
from dgemma_trt.errors import UserError
from dgemma_trt.weights import PARTS, Linear, Precision, linear_shapes, tensor_shapes

INDEX_FILE = "model.safetensors.index.json"
VISION = ("vision_tower.", "embed_vision.")
TIED_PREFIXES = {"decoder": "decoder.", "encoder": "encoder.language_model."}
KV_SCALE = re.compile(r"layers\.\d+\.self_attn\.(k_proj\.k_scale|v_proj\.v_scale|k_scale|v_scale)")
FLOATING = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies: its file, its key there, and what the file's header says of it."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key} ({self.dtype} {list(self.shape)})"


class Checkpoint:
    """A checkpoint folder, opened and checked; implements `Weights`.

    `notes` holds one line for each thing a user should know but need not mend.
    """

    def __init__(self, folder: Path) -> None:
        """Opens `folder`.

        Raises:
            UserError: no such folder, no config.json, another model, a damaged or missing shard, unknown, missing or
                misshapen tensors.
        """
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; give a checkpoint folder or a Hugging Face id such as org/name")
        if not (folder / "config.json").exists():
            if (folder / "manifest.json").exists():
                raise UserError(f"{folder}: is an engine directory; give the checkpoint it was built from")
            raise UserError(f"{folder / 'config.json'}: no such file; give a checkpoint folder or an engine directory")
        self.folder = folder
        self.notes: list[str] = []
        config = read_json(folder / "config.json")
        self._config = ModelConfig.from_dict(config, str(folder / "config.json"))
        generation = folder / "generation_config.json"
        self.generation_config = GenerationConfig.from_dict(
            read_json(generation) if generation.exists() else {},
            config["text_config"].get("eos_token_id", 1),
            str(generation),
        )
        self._handles: dict[Path, Any] = {}
        self._stored = self._index()
        self._used: set[str] = set()
        self._readers = self._plan()
        self._refuse_leftovers()

    @property
    def config(self) -> ModelConfig:
        """The model's sizes."""
        return self._config

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding table as stored."""
        return {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[self._stored["embed_tokens.weight"].dtype]

    def tensor(self, name: str) -> Tensor:
        """A plain tensor, as stored (memory-mapped)."""
        found = self._readers[name]()
        assert isinstance(found, Tensor)
        return found

    def linear(self, name: str) -> Linear:
        """A matmul's weight; experts are stacked, which copies them when the file holds them one by one.

        Raises:
            UserError: a scale that is zero, negative or not finite.
        """
        found = self._readers[name]()
        assert isinstance(found, Linear)
        return found

    def precision(self, name: str) -> Precision:
        """The precision of a matmul's weight, from the file's header alone."""
        return self._precisions[name]

    # Reading the files' headers

    def _index(self) -> dict[str, Stored]:
        found: dict[str, dict[str, Stored]] = {}
        vision = 0
        for file in self._shards():
            handle = self._open(file)
            for key in handle.keys():  # noqa: SIM118 (not a dict)
                name = key.removeprefix("model.").removeprefix("language_model.")
                if name.removeprefix("encoder.").startswith(VISION):
                    vision += 1
                    continue
                side = "decoder"
                for candidate, prefix in TIED_PREFIXES.items():
                    if name.startswith(prefix):
                        side, name = candidate, name.removeprefix(prefix)
                if name.endswith("layer_scalar"):
                    name = f"{name}.{side}"
                piece = handle.get_slice(key)
                stored, copies = Stored(file, key, tuple(piece.get_shape()), piece.get_dtype()), found.setdefault(name, {})
                if side in copies:
                    raise UserError(f"{stored} and {copies[side]} are one tensor of the model; remove what is left over")
                copies[side] = stored
        if vision:
            self.notes.append(f"{vision} vision tensors set aside: images are not supported")
        if "lm_head.weight" in found and "embed_tokens.weight" in found:
            found["embed_tokens.weight"]["lm_head"] = found.pop("lm_head.weight")["decoder"]
        self._complete_layer_scalars(found)
        for copies in found.values():
            self._refuse_differing_copies(list(copies.values()))
        return {name: next(iter(copies.values())) for name, copies in found.items()}

    def _shards(self) -> list[Path]:
        index = self.folder / INDEX_FILE
        if not index.exists():
            files = sorted(self.folder.glob("*.safetensors"))
            if not files:
                raise UserError(f"{self.folder}: holds no .safetensors file")
            return files
        mapping = read_json(index).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise UserError(f"{index}: weight_map is missing or empty")
        files = sorted({self.folder / str(name) for name in mapping.values()})
        for file in files:
            if not file.is_file():
                raise UserError(f"{file}: this shard is listed in {INDEX_FILE} but missing; fetch the checkpoint again")
        present = {key for file in files for key in self._open(file).keys()}  # noqa: SIM118
        if absent := sorted(set(mapping) - present):
            raise UserError(f"{self.folder / mapping[absent[0]]}: lacks {absent[0]}, which {INDEX_FILE} says it holds")
        return files

    def _open(self, file: Path) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file}: damaged or truncated ({error}); fetch it again") from None
        return self._handles[file]

    def _complete_layer_scalars(self, found: dict[str, dict[str, Stored]]) -> None:
        for side, other in (("encoder", "decoder"), ("decoder", "encoder")):
            names = [f"{layer.name}.layer_scalar" for layer in self._config.layers]
            absent = [name for name in names if f"{name}.{side}" not in found and f"{name}.{other}" in found]
            for name in absent:
                found[f"{name}.{side}"] = found[f"{name}.{other}"]
            if absent:
                self.notes.append(
                    f"{len(absent)} of {len(names)} layer_scalars of the {side} are missing; the {other}'s serve both"
                )

    def _refuse_differing_copies(self, copies: list[Stored]) -> None:
        first, *rest = copies
        for other in rest:
            if first.shape != other.shape or first.dtype != other.dtype or not _same(self._load(first), self._load(other)):
                raise UserError(
                    f"{self.folder}: {first.key} and {other.key} should be one tied weight but differ; untied weights are "
                    "not implemented"
                )

    # Matching what is there with what the network needs

    def _plan(self) -> dict[str, Callable[[], Tensor | Linear]]:
        readers: dict[str, Callable[[], Tensor | Linear]] = {}
        self._precisions: dict[str, Precision] = {}
        for name, shape in tensor_shapes(self._config):
            bare = name.endswith("scale") or "layer_scalar" in name
            stored = self._need(name if bare else f"{name}.weight", shape, FLOATING)
            readers[name] = partial(self._load, stored)
        for name, shape in linear_shapes(self._config):
            fused = self._fused_experts(name, shape)
            if fused is not None:
                readers[name] = fused
                self._precisions[name] = Precision.BF16
                continue
            single = shape[-2:]
            names = [name] if len(shape) == 2 else [self._expert_name(name, k) for k in range(shape[0])]
            parts = [self._linear_parts(each, single) for each in names]
            precisions = {each: precision for each, (precision, _) in zip(names, parts, strict=True)}
            self._precisions[name] = parts[0][0]
            if len(set(precisions.values())) > 1:
                odd = next(each for each, precision in precisions.items() if precision is not parts[0][0])
                raise UserError(
                    f"{self.folder}: {odd} is stored as {precisions[odd]}, but {names[0]} as {parts[0][0]}; experts of one "
                    "layer must agree"
                )
            readers[name] = partial(self._load_linear, parts, stacked=len(shape) == 3)
        return readers

    def _fused_experts(self, name: str, shape: tuple[int, ...]) -> Callable[[], Linear] | None:
        if len(shape) == 2 or not any(
            f"{name.rpartition('.')[0]}.{kind}" in self._stored for kind in ("gate_up_proj", "down_proj")
        ):
            return None
        experts, _, kind = name.rpartition(".")
        if kind == "down_proj":
            stored = self._need(name, shape, FLOATING)
            return lambda: Linear(Precision.BF16, self._load(stored))
        count, width, hidden = shape
        stored = self._need(f"{experts}.gate_up_proj", (count, 2 * width, hidden), FLOATING)
        half = slice(0, width) if kind == "gate_proj" else slice(width, 2 * width)
        return lambda: Linear(Precision.BF16, self._load(stored)[:, half])

    @staticmethod
    def _expert_name(name: str, index: int) -> str:
        experts, _, kind = name.rpartition(".")
        return f"{experts}.{index}.{kind}"

    def _linear_parts(self, name: str, shape: tuple[int, ...]) -> tuple[Precision, dict[str, Stored]]:
        parts = {part: self._stored[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in self._stored}
        self._used.update(f"{name}.{part}" for part in parts)
        weight = parts.get("weight")
        if weight is None:
            self._complain_of_missing(name, parts)
        assert weight is not None
        rows, columns = shape
        expected: dict[str, tuple[int, ...]] = {"weight": shape}
        scale = parts.get("weight_scale")
        if weight.dtype in FLOATING:
            precision = Precision.BF16
        elif weight.dtype == "F8_E4M3":
            per_tensor = scale is not None and scale.shape in ((), (1,))
            precision = Precision.FP8_STATIC if per_tensor else Precision.FP8
            expected["weight_scale"] = () if per_tensor else (rows,)
            if per_tensor:
                expected["input_scale"] = ()
        elif weight.dtype == "U8":
            precision = Precision.NVFP4 if "input_scale" in parts else Precision.NVFP4_WEIGHTS
            if columns % 16:
                raise UserError(f"{weight}: NVFP4 needs a multiple of 16 inputs")
            expected = {"weight": (rows, columns // 2), "weight_scale": (rows, columns // 16), "weight_scale_2": ()}
            if precision is Precision.NVFP4:
                expected["input_scale"] = ()
            if scale is not None and scale.dtype != "F8_E4M3":
                raise UserError(f"{scale}: expected F8_E4M3 block scales [{rows}, {columns // 16}]; are they swizzled?")
        else:
            raise UserError(f"{weight}: no precision that is known here stores weights so")
        for part, wanted in expected.items():
            found = parts.get(part)
            if found is None:
                raise UserError(f"{weight.file}: {name}.{part} is missing, although the weight is {weight.dtype} ({precision})")
            if found.shape != wanted and not _same_up_to_ones(found.shape, wanted):
                raise UserError(f"{found}: expected shape {list(wanted)}")
        if surplus := sorted(set(parts) - set(expected)):
            raise UserError(f"{parts[surplus[0]]}: a scale that does not belong to a {weight.dtype} weight ({precision})")
        return precision, parts

    def _complain_of_missing(self, name: str, parts: dict[str, Stored]) -> None:
        if f"{name}.weight_packed" in self._stored:
            raise UserError(f"{self.folder}: {name} is in compressed-tensors format, which is not read yet")
        if parts:
            raise UserError(f"{next(iter(parts.values()))}: a scale without its weight; {name}.weight is missing")
        raise UserError(f"{self.folder}: tensor {name}.weight is missing; the checkpoint is incomplete")

    def _need(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Stored:
        stored = self._stored.get(name)
        if stored is None:
            raise UserError(f"{self.folder}: tensor {name} is missing; the checkpoint is incomplete")
        self._used.add(name)
        if stored.shape != shape and not _same_up_to_ones(stored.shape, shape):
            raise UserError(f"{stored}: expected shape {list(shape)} by config.json")
        if stored.dtype not in dtypes:
            raise UserError(f"{stored}: expected one of {', '.join(dtypes)}")
        return stored

    def _refuse_leftovers(self) -> None:
        unknown = sorted(name for name in self._stored.keys() - self._used if not KV_SCALE.fullmatch(name))
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise UserError(f"{self._stored[unknown[0]]}: unknown tensor{more}; is config.json of the same model?")

    # Loading

    def _load(self, stored: Stored) -> Tensor:
        tensor: Tensor = self._open(stored.file).get_tensor(stored.key)
        return tensor

    def _load_linear(self, parts: list[tuple[Precision, dict[str, Stored]]], stacked: bool) -> Linear:
        loaded: dict[str, Tensor] = {}
        for part in parts[0][1]:
            pieces = [self._load(stored[part]) for _, stored in parts]
            if part in ("weight_scale_2", "input_scale"):
                pieces = [piece.float().reshape(()) for piece in pieces]
                self._refuse_unusable_scales(part, pieces, [stored[part] for _, stored in parts])
            elif part == "weight_scale" and pieces[0].dtype != torch.float8_e4m3fn:
                pieces = [piece.float().squeeze() for piece in pieces]
            loaded[part] = torch.stack(pieces) if stacked else pieces[0]
        return Linear(parts[0][0], **loaded)

    def _refuse_unusable_scales(self, part: str, scales: list[Tensor], stored: list[Stored]) -> None:
        values = torch.stack(scales)
        bad = ((values <= 0) | ~values.isfinite()).nonzero().flatten().tolist()
        if bad:
            which = ", ".join(stored[index].key.removesuffix(f".{part}") for index in bad[:4])
            more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
            raise UserError(
                f"{stored[bad[0]].file}: {part} is {values[bad[0]].item()} for {which}{more}; calibration never reached "
                "these: quantize again with more prompts"
            )


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.ndim else a.item() == b.item()


def _same_up_to_ones(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Shapes that differ in dimensions of one alone: [out, 1] for [out], [1] for []."""
    return [n for n in found if n != 1] == [n for n in wanted if n != 1]
