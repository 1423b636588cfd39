"""Opening checkpoint folders: prefixes, fused and single experts, shards, layer scalars, and every kind of damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dgemma_trt.checkpoint import Checkpoint
from dgemma_trt.errors import UserError
from dgemma_trt.formats import quantize_nvfp4
from dgemma_trt.weights import Precision

Tensors = dict[str, Tensor]
DECODER, ENCODER = "model.decoder.", "model.encoder.language_model."


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    reference.save(reference.random_model(), folder)
    tensors = {k: v for k, v in load_file(folder / "model.safetensors").items() if "vision" not in k}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "checkpoint"))


def change(folder: Path, edit: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def everything(checkpoint: Checkpoint) -> Tensors:
    from dgemma_trt.weights import linear_shapes, tensor_shapes

    found = {name: checkpoint.tensor(name) for name, _ in tensor_shapes(checkpoint.config)}
    return found | {name: checkpoint.linear(name).dequantize() for name, _ in linear_shapes(checkpoint.config)}


def assert_same_weights(first: Checkpoint, second: Checkpoint) -> None:
    expected, found = everything(first), everything(second)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_every_weight_is_found_with_both_layer_scalars(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    assert checkpoint.notes == []
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(checkpoint.tensor("layers.3.layer_scalar.encoder"), stored[f"{ENCODER}layers.3.layer_scalar"])
    assert torch.equal(checkpoint.tensor("layers.3.layer_scalar.decoder"), stored[f"{DECODER}layers.3.layer_scalar"])
    gate = checkpoint.linear("layers.0.experts.gate_proj").weight
    assert torch.equal(gate, stored[f"{DECODER}layers.0.experts.gate_up_proj"][:, :48])
    assert checkpoint.precision("layers.0.experts.gate_proj") is Precision.BF16


def test_the_encoder_prefix_serves_as_well(original: Path, folder: Path) -> None:
    def rename(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(f"{DECODER}layers.") and not n.endswith("layer_scalar")]:
            tensors[name.replace(DECODER, ENCODER)] = tensors.pop(name)

    change(folder, rename)
    assert_same_weights(Checkpoint(original), Checkpoint(folder))


def test_experts_one_by_one_equal_fused_ones(original: Path, folder: Path) -> None:
    def split(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith("gate_up_proj")]:
            prefix, fused = name.removesuffix("gate_up_proj"), tensors.pop(name)
            down = tensors.pop(f"{prefix}down_proj")
            for k in range(len(fused)):
                gate, up = fused[k].chunk(2)
                tensors |= {
                    f"{prefix}{k}.gate_proj.weight": gate,
                    f"{prefix}{k}.up_proj.weight": up,
                    f"{prefix}{k}.down_proj.weight": down[k],
                }

    change(folder, split)
    assert_same_weights(Checkpoint(original), Checkpoint(folder))


def test_shards_equal_one_file(original: Path, folder: Path) -> None:
    shard(folder)
    assert_same_weights(Checkpoint(original), Checkpoint(folder))


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    mapping: dict[str, str] = {}
    for index in range(3):
        file = f"model-0000{index + 1}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[index::3]}, folder / file)
        mapping |= dict.fromkeys(names[index::3], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))


def test_vision_tensors_are_set_aside_with_one_line(folder: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.encoder.vision_tower.patch.weight"] = torch.ones(2, 2)
        tensors["model.encoder.embed_vision.projection.weight"] = torch.ones(2, 2)

    change(folder, add)
    assert Checkpoint(folder).notes == ["2 vision tensors set aside: images are not supported"]


@pytest.mark.parametrize("missing", ["encoder", "decoder"])
def test_one_set_of_layer_scalars_serves_both_with_one_line(missing: str, folder: Path) -> None:
    prefix = ENCODER if missing == "encoder" else DECODER

    def drop(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(prefix) and n.endswith("layer_scalar")]:
            del tensors[name]

    change(folder, drop)
    checkpoint = Checkpoint(folder)
    assert len(checkpoint.notes) == 1 and missing in checkpoint.notes[0]
    assert torch.equal(checkpoint.tensor("layers.2.layer_scalar.encoder"), checkpoint.tensor("layers.2.layer_scalar.decoder"))


def test_a_tied_lm_head_and_tied_copies_are_accepted(folder: Path) -> None:
    def copy(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors[f"{DECODER}embed_tokens.weight"].clone()
        tensors[f"{ENCODER}layers.0.mlp.up_proj.weight"] = tensors[f"{DECODER}layers.0.mlp.up_proj.weight"].clone()

    change(folder, copy)
    assert Checkpoint(folder).notes == []


def test_kv_cache_scales_are_known(folder: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors[f"{DECODER}layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
        tensors[f"{DECODER}layers.2.self_attn.v_proj.v_scale"] = torch.tensor(1.0)

    change(folder, add)
    Checkpoint(folder)


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, tensor: Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (drop(f"{DECODER}layers.1.self_attn.q_norm.weight"), "layers.1.self_attn.q_norm.weight"),
        (drop(f"{DECODER}layers.1.router.scale"), "layers.1.router.scale"),
        (drop(f"{DECODER}layers.1.router.per_expert_scale"), "layers.1.router.per_expert_scale"),
        (drop(f"{DECODER}layers.4.experts.down_proj"), "layers.4.experts.down_proj"),
        (drop(f"{DECODER}self_conditioning.up_proj.weight"), "self_conditioning.up_proj.weight"),
        (put(f"{DECODER}layers.0.extra.weight", torch.ones(1)), "layers.0.extra.weight"),
        (put(f"{DECODER}layers.2.self_attn.v_proj.weight", torch.ones(40, 64)), "layers.2.self_attn.v_proj.weight"),
        (put(f"{DECODER}norm.weight", torch.ones(63)), "norm.weight"),
        (put(f"{DECODER}layers.0.mlp.up_proj.weight", torch.ones(64, 80)), "layers.0.mlp.up_proj.weight"),
        (put(f"{DECODER}layers.0.mlp.up_proj.weight_scale", torch.ones(80)), "layers.0.mlp.up_proj.weight_scale"),
        (put(f"{ENCODER}layers.0.mlp.up_proj.weight", torch.ones(80, 64)), "tied"),
        (put("lm_head.weight", torch.ones(199, 64)), "lm_head.weight"),
    ],
)
def test_a_missing_unknown_or_misshapen_tensor_is_named(edit: Callable[[Tensors], None], named: str, folder: Path) -> None:
    change(folder, edit)
    with pytest.raises(UserError, match=named.replace(".", r"\.")):
        Checkpoint(folder)


def test_both_layer_scalars_missing_is_an_error(folder: Path) -> None:
    def drop_all(tensors: Tensors) -> None:
        for name in [n for n in tensors if "layers.5." in n and n.endswith("layer_scalar")]:
            del tensors[name]

    change(folder, drop_all)
    with pytest.raises(UserError, match=r"layers\.5\.layer_scalar"):
        Checkpoint(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors: damaged or truncated"):
        Checkpoint(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00003\.safetensors.*missing"):
        Checkpoint(folder)


def test_a_folder_without_what_it_needs(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        Checkpoint(tmp_path / "absent")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \.safetensors file"):
        Checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        Checkpoint(folder)


def test_a_tensor_that_is_there_twice_is_named(folder: Path) -> None:
    save_file({f"{DECODER}norm.weight": torch.ones(64)}, folder / "rest.safetensors")
    with pytest.raises(UserError, match=r"rest\.safetensors.*norm\.weight.*one tensor"):
        Checkpoint(folder)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["weight_scale_2", "input_scale"])
def test_a_scale_that_calibration_never_set_is_named(part: str, value: float, folder: Path) -> None:
    name = f"{DECODER}layers.0.mlp.up_proj"

    def to_nvfp4(tensors: Tensors) -> None:
        codes, scale, global_scale = quantize_nvfp4(tensors[f"{name}.weight"])
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scale, f"{name}.weight_scale_2": global_scale}
        tensors[f"{name}.input_scale"] = torch.tensor(1.0)
        tensors[f"{name}.{part}"] = torch.tensor(value)

    change(folder, to_nvfp4)
    with pytest.raises(UserError, match=rf"{part} is .* for .*layers\.0\.mlp\.up_proj"):
        Checkpoint(folder).linear("layers.0.mlp.up_proj")
