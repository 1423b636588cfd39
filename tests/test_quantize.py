"""Quantizing tiny random checkpoints: what ends up in the folder, against ModelOpt and the source."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import random_model, save
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from dgemma_trt.checkpoint import Checkpoint
from dgemma_trt.errors import UserError
from dgemma_trt.nano.tokenizer import VOCAB_SIZE, save_tokenizer
from dgemma_trt.quantize import QuantizationReport, export, pipeline, quantize_checkpoint
from dgemma_trt.quantize.calibration import Coverage, InputRange, calibrate
from dgemma_trt.quantize.libraries import quiet_libraries
from dgemma_trt.quantize.prompts import tokenized_chats
from dgemma_trt.quantize.recipes import RECIPES
from dgemma_trt.quantize.reference import reference_model
from dgemma_trt.weights import Precision, linear_shapes

LAYERS, EXPERTS = 3, 6
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
UNSEEN = 5
"""The expert of layer 0 that the router can never choose."""
FORMATS = {
    "fp8": {"weight": "F8_E4M3", "weight_scale": "F32"},
    "nvfp4": {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32", "input_scale": "F32"},
}
X_ROWS = 40


def tiny_checkpoint(folder: Path, *, vision: bool) -> Path:
    """A random bf16 checkpoint with the nano tokenizer, short loops, and one expert that no token can reach."""
    model = random_model(vocab_size=VOCAB_SIZE, num_hidden_layers=LAYERS, layer_types=KINDS)
    with torch.no_grad():
        router = model.model.decoder.layers[0].router.proj.weight
        # Two experts hold |a|, which is above the last one's 0, and only two are chosen.
        router[1], router[2], router[3], router[UNSEEN] = -router[0], router[0], -router[0], 0
    save(model.to(torch.bfloat16), folder)
    if not vision:
        tensors = load_file(folder / "model.safetensors")
        save_file({key: tensor for key, tensor in tensors.items() if "vision" not in key}, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        del config["vision_config"]
        (folder / "config.json").write_text(json.dumps(config))
    generation = {"eos_token_id": [1, 106], "max_denoising_steps": 2, "max_new_tokens": 8}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices are so small here that a second thread costs more than it does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Quantized:
    """One run: its folders and report, what it printed, and what ModelOpt held in memory before the export."""

    quant: str
    source: Checkpoint
    out: Checkpoint
    report: QuantizationReport
    printed: str
    weights: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


def modelopt_nvfp4(x: Tensor, amax: float) -> Tensor:
    """ModelOpt's NVFP4 rounding on a CPU, where its fake quantization does not run."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    codes, scale, double_scale = NVFP4QTensor.quantize(x.clone(), 16, weights_scaling_factor_2=torch.tensor(amax) / 2688)
    return codes.dequantize(torch.float32, scale=scale, double_scale=double_scale, block_sizes={-1: 16})


def in_memory(model: Any, run: Quantized) -> None:
    """Records the fake-quantized weights and the outputs of ModelOpt's layers, the two modes' ranges merged."""
    siblings = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    sides = (model.model.encoder.language_model, model.model.decoder)
    generator = torch.Generator().manual_seed(1)
    for name, shape in linear_shapes(run.source.config):
        if not name.startswith("layers."):
            continue
        parent, _, kind = name.rpartition(".")
        owners = [side.get_submodule(parent) for side in sides]
        if len(shape) == 3:
            attribute = "down_proj" if kind == "down_proj" else "gate_up_proj"
            half = slice(shape[1], None) if kind == "up_proj" else slice(None, shape[1])
            rounded = [
                fake_quantized(weight, quantizer, weight.abs().max())
                for weight, quantizer in zip(
                    getattr(owners[1], attribute).float(), getattr(owners[1], f"{attribute}_weight_quantizers"), strict=True
                )
            ]
            run.weights[name] = torch.stack(rounded)[:, half]
            continue
        group = next((group for group in siblings if kind in group), (kind,))
        linears = [getattr(owner, sibling) for owner in owners for sibling in group if getattr(owner, sibling, None)]
        layer = getattr(owners[1], kind)
        # Linears with the same input share a weight range in ModelOpt's export.
        amax = max(linear.weight.float().abs().max() for linear in linears)
        run.weights[name] = fake_quantized(layer.weight.float(), layer.weight_quantizer, amax)
        x = torch.randn(X_ROWS, shape[1], generator=generator)
        if run.quant == "nvfp4":
            input_amax = max(linear.input_quantizer.amax for linear in linears)
            rounded_x = modelopt_nvfp4(x, float(input_amax))
        else:
            rounded_x = layer.input_quantizer(x)
        run.inputs[name] = x
        run.outputs[name] = functional.linear(rounded_x, run.weights[name])


def fake_quantized(weight: Tensor, quantizer: Any, amax: Tensor) -> Tensor:
    return quantizer(weight) if quantizer.num_bits == (4, 3) else modelopt_nvfp4(weight, float(amax))


@pytest.fixture(scope="module", params=["fp8", "nvfp4"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quantized]:
    folder = tmp_path_factory.mktemp(request.param)
    source = Checkpoint(tiny_checkpoint(folder / "source", vision=request.param == "nvfp4"))
    printed = io.StringIO()
    recorded = Quantized(request.param, source, source, None, "")  # type: ignore[arg-type]

    def spy(model: Any, *arguments: Any) -> None:
        in_memory(model, recorded)
        export.export(model, *arguments)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        patch.setattr(pipeline, "export", spy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            recorded.report = quantize_checkpoint(source.folder, request.param, folder / "out")
    recorded.out = Checkpoint(folder / "out")
    recorded.printed = printed.getvalue() + "".join(str(warning.message) for warning in caught)
    yield recorded


# What is in the folder


def test_every_matmul_of_the_layers_is_quantized_and_nothing_else(run: Quantized):
    tensors = load_file(run.out.folder / "model.safetensors")
    expected = set()
    for name, shape in linear_shapes(run.out.config):
        wanted = RECIPES[run.quant].precision if name.startswith("layers.") else Precision.BF16
        assert run.out.precision(name) is wanted
        if wanted is not Precision.BF16:
            parent, _, kind = name.rpartition(".")
            names = [f"{parent}.{expert}.{kind}" for expert in range(EXPERTS)] if len(shape) == 3 else [name]
            expected |= {f"model.decoder.{each}.{suffix}" for each in names for suffix in FORMATS[run.quant]}
    quantized = {key for key, tensor in tensors.items() if tensor.dtype not in (torch.bfloat16,)}
    assert quantized == expected
    assert len(expected) == (3 * EXPERTS + 3) * LAYERS * len(FORMATS[run.quant]) + (4 * LAYERS - 1) * len(FORMATS[run.quant])


def test_the_rest_is_the_source_bit_for_bit(run: Quantized):
    source, out = (load_file(folder / "model.safetensors") for folder in (run.source.folder, run.out.folder))
    kept = {key for key, tensor in out.items() if tensor.dtype == torch.bfloat16}
    assert all(torch.equal(out[key], source[key]) for key in kept)
    layers = {key for key in source if ".layers." in key and key.rsplit(".", 2)[-2].endswith("_proj") and "vision" not in key}
    fused = {key for key in source if "experts.gate_up_proj" in key or "experts.down_proj" in key}
    assert kept == source.keys() - layers - fused


def test_both_sets_of_layer_scalars_are_exported(run: Quantized):
    for index in range(LAYERS):
        sides = [f"layers.{index}.layer_scalar.{side}" for side in ("encoder", "decoder")]
        assert all(torch.equal(run.out.tensor(name), run.source.tensor(name)) for name in sides)
        assert run.out.tensor(sides[0]) != run.out.tensor(sides[1])
    assert not any("layer_scalar" in note for note in run.out.notes)


def test_configuration_and_tokenizer_go_along(run: Quantized):
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (run.source.folder, run.out.folder))
    quantization = after.pop("quantization_config")
    assert after == before
    described = json.loads((run.out.folder / "hf_quant_config.json").read_text())["quantization"]
    assert quantization["quant_algo"] == described["quant_algo"]
    assert described["quant_algo"] == {"fp8": "FP8_PER_CHANNEL_PER_TOKEN", "nvfp4": "NVFP4"}[run.quant]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (run.out.folder / name).read_bytes() == (run.source.folder / name).read_bytes()
    # Vision weights are not quantized, and only listed where there are some.
    assert ("model.encoder.vision_tower*" in quantization["ignore"]) == (run.quant == "nvfp4")
    assert all(file.stat().st_mode & 0o444 for file in run.out.folder.iterdir())


def test_nothing_is_printed(run: Quantized):
    assert run.printed == ""


# Values


def at_ties(run: Quantized, name: str) -> Tensor:
    """Where ModelOpt's FP8 weights in memory differ from those it exports: bool [..., out, in].

    It divides by amax / 448 for the file and multiplies by 448 / amax in memory, which parts weights that lie exactly
    between two codes; among bf16 weights that is about one in 1500.
    """
    ours, theirs = run.out.linear(name).dequantize(), run.weights[name]
    return (ours - theirs).abs() > 1e-6 * theirs.abs()


def test_dequantized_weights_are_those_modelopt_holds_in_memory(run: Quantized):
    assert len(run.weights) == 10 * LAYERS - 1
    for name, theirs in run.weights.items():
        linear = run.out.linear(name)
        if linear.precision is Precision.NVFP4:
            assert torch.equal(linear.dequantize(), theirs), name
            continue
        differing = at_ties(run, name)
        assert differing.float().mean() <= 0.004, name
        assert linear.weight_scale is not None
        scaled = run.source.linear(name).weight.float().abs() / linear.weight_scale[..., None]
        # Midpoints between e4m3 codes have one bit more than the codes.
        halves = scaled[differing] / torch.exp2(scaled[differing].log2().floor() - 4)
        assert ((halves - halves.round()).abs() < 1e-4).all() and (halves.round() % 2 == 1).all()


def test_exported_codes_dequantize_as_in_modelopt(run: Quantized):
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    for name, shape in linear_shapes(run.out.config):
        linear = run.out.linear(name)
        for index in range(shape[0]) if len(shape) == 3 else [None]:
            one = linear if index is None else linear.expert(index)
            if one.precision is Precision.FP8:
                assert one.weight_scale is not None
                theirs = FP8QTensor(shape[-2:], torch.float32, one.weight).dequantize(scale=one.weight_scale[:, None])
            elif one.precision is Precision.NVFP4:
                theirs = NVFP4QTensor(shape[-2:], torch.float32, one.weight).dequantize(
                    scale=one.weight_scale, double_scale=one.weight_scale_2, block_sizes={-1: 16}
                )
            else:
                continue
            assert torch.equal(one.dequantize(), theirs), name


def test_layers_agree_with_modelopts_on_the_same_input(run: Quantized):
    for name, theirs in run.outputs.items():
        linear = run.out.linear(name)
        ours = functional.linear(linear.round_input(run.inputs[name]), linear.dequantize())
        differing = (ours - theirs).abs() > 1e-5 * theirs.abs().amax(-1, keepdim=True)
        if run.quant == "fp8":
            differing = differing[:, ~at_ties(run, name).any(-1)]
        assert differing.float().mean() <= 0.001, name


# Calibration


def test_input_scales_cover_both_modes(run: Quantized):
    if run.quant == "fp8":
        assert run.report.input_ranges == {} and run.report.coverage is None
        return
    assert run.report.input_ranges.keys() == run.weights.keys()
    for name, observed in run.report.input_ranges.items():
        scale = run.out.linear(name).input_scale
        assert scale is not None
        assert observed.encoder > 0 and observed.decoder > 0
        assert (scale * 2688 >= observed.merged * (1 - 1e-6)).all(), name
    # Either mode alone would clip the other.
    assert any(observed.encoder < observed.merged for observed in run.report.input_ranges.values())
    assert any(observed.decoder < observed.merged for observed in run.report.input_ranges.values())


def test_ranges_are_those_of_the_unquantized_model(run: Quantized):
    """The same loop without ModelOpt, watched by hooks of this test."""
    if run.quant == "fp8":
        return
    with quiet_libraries():
        model = reference_model(run.source)
    largest: dict[tuple[str, str], float] = {}

    def watch(mode: str, name: str) -> Callable[..., None]:
        def hook(_: Any, arguments: tuple[Tensor, ...]) -> None:
            largest[mode, name] = max(largest.get((mode, name), 0.0), arguments[0].abs().max().item())

        return hook

    for mode, side in (("encoder", model.model.encoder.language_model), ("decoder", model.model.decoder)):
        for name in run.report.input_ranges:
            if ".experts." not in name:
                side.get_submodule(name).register_forward_pre_hook(watch(mode, name))
    coverage = calibrate(
        model, tokenized_chats(run.source.folder), run.source.config, run.source.generation_config, lambda _: None
    )
    assert run.report.coverage is not None
    assert coverage.denoising_steps == run.report.coverage.denoising_steps
    for name, tokens in coverage.expert_tokens.items():
        assert torch.equal(tokens, run.report.coverage.expert_tokens[name])
    for (mode, name), value in largest.items():
        assert value == getattr(run.report.input_ranges[name], mode), (mode, name)


def test_commits_and_steps_are_seen_and_unreached_experts_found(run: Quantized):
    coverage = run.report.coverage
    if coverage is None:
        return
    assert coverage.commits > 0 and coverage.denoising_steps > 2 * coverage.prompts
    assert coverage.unseen_experts == {"layers.0": [UNSEEN]}
    for kind in ("gate_proj", "up_proj", "down_proj"):
        scales = run.out.linear(f"layers.0.experts.{kind}").input_scale
        assert scales is not None and (scales == scales[0]).all() and scales[0] > 0
    assert any("1 experts saw no token" in note for note in run.report.notes)


def test_the_bundled_chats_suit_the_nano_template(run: Quantized):
    prompts = tokenized_chats(run.source.folder)
    assert len(prompts) == 16 and all(prompt[0, 0] == 2 for prompt in prompts)


# Report


def test_report_counts_tensors_and_bytes(run: Quantized):
    rows = {row.kind: row for row in run.report.kinds}
    assert rows["experts"].tensors == 3 * EXPERTS * LAYERS
    assert rows["attention"].tensors == 4 * LAYERS - 1
    assert rows["dense MLP"].tensors == 3 * LAYERS
    assert rows["router"].precision is rows["self-conditioning"].precision is Precision.BF16
    tensors = load_file(run.out.folder / "model.safetensors")
    language = sum(t.numel() * t.element_size() for key, t in tensors.items() if "vision" not in key)
    assert run.report.bytes == language
    assert rows["experts"].precision is RECIPES[run.quant].precision
    assert rows["experts"].bits_per_weight == pytest.approx({"fp8": 8.6, "nvfp4": 4.5}[run.quant], abs=0.1)


def test_report_as_a_table(run: Quantized):
    from rich.console import Console

    output = io.StringIO()
    Console(file=output, width=120).print(run.report.table())
    text = output.getvalue()
    assert all(kind in text for kind in ("experts", "dense MLP", "attention", "router", "embeddings", run.quant))


# Failures


def only_source_is_left(folder: Path) -> bool:
    return [path.name for path in folder.iterdir()] == ["source"]


@pytest.mark.parametrize("failure", [RuntimeError("out of luck"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_nothing_half_written_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException):
    tiny_checkpoint(tmp_path / "source", vision=False)

    def fail(_: Any, __: Any, out: Path) -> None:
        (out / "model.safetensors").write_bytes(b"half")
        raise failure

    monkeypatch.setattr(pipeline, "export", fail)
    with pytest.raises(UserError if isinstance(failure, OSError) else type(failure)):
        quantize_checkpoint(tmp_path / "source", "fp8", tmp_path / "out")
    assert only_source_is_left(tmp_path)


def test_experts_left_in_bf16_are_an_error(run: Quantized):
    with pytest.raises(UserError, match=r"left layers.0.self_attn.q_proj in bf16"):
        export.verify(run.source.folder, RECIPES[run.quant], {})


def test_fused_experts_left_in_bf16_are_an_error(run: Quantized, tmp_path: Path):
    folder = Path(shutil.copytree(run.out.folder, tmp_path / "out"))
    tensors = load_file(folder / "model.safetensors")
    tensors = {key: tensor for key, tensor in tensors.items() if "layers.1.experts." not in key}
    original = load_file(run.source.folder / "model.safetensors")
    tensors |= {key: tensor for key, tensor in original.items() if "layers.1.experts." in key and "encoder" not in key}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"left layers.1.experts.gate_proj in bf16"):
        export.verify(folder, RECIPES[run.quant], {})


def test_an_input_scale_of_one_mode_alone_is_an_error(run: Quantized):
    if run.quant == "fp8":
        return
    name, observed = next(iter(run.report.input_ranges.items()))
    with pytest.raises(UserError, match=f"input scale of {name} covers"):
        export.verify(run.out.folder, RECIPES["nvfp4"], {name: InputRange(observed.encoder, 3 * observed.merged)})


def test_quantizing_what_is_quantized_already_is_an_error(run: Quantized, tmp_path: Path):
    with pytest.raises(UserError, match=rf"is {run.quant} already; give the bf16 checkpoint"):
        quantize_checkpoint(run.out.folder, "nvfp4", tmp_path / "out")


def test_bad_requests(tmp_path: Path):
    source = tiny_checkpoint(tmp_path / "source", vision=False)
    with pytest.raises(UserError, match="'int3' is no quantization; choose one of fp8, nvfp4"):
        quantize_checkpoint(source, "int3", tmp_path / "out")
    with pytest.raises(UserError, match="no such folder"):
        quantize_checkpoint(tmp_path / "absent", "fp8", tmp_path / "out")
    with pytest.raises(UserError, match="is the checkpoint itself"):
        quantize_checkpoint(source, "fp8", source, replace=True)
    assert only_source_is_left(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already"):
        quantize_checkpoint(source, "fp8", tmp_path / "out")


def test_nvfp4_needs_multiples_of_16(tmp_path: Path):
    model = random_model(num_hidden_layers=1, layer_types=KINDS[:1], moe_intermediate_size=40)
    save(model.bfloat16(), tmp_path / "source")
    with pytest.raises(UserError, match=r"layers.0.experts.down_proj has 40 inputs; NVFP4 needs a multiple of 16"):
        quantize_checkpoint(tmp_path / "source", "nvfp4", tmp_path / "out")


def test_missing_tokenizer_is_an_error_before_the_model_loads(tmp_path: Path):
    source = tiny_checkpoint(tmp_path / "source", vision=False)
    (source / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="tokenizer"):
        quantize_checkpoint(source, "nvfp4", tmp_path / "out")
    assert only_source_is_left(tmp_path)


def test_missing_libraries_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import sys

    source = tiny_checkpoint(tmp_path / "source", vision=False)
    monkeypatch.setitem(sys.modules, "modelopt.torch.export", None)
    with pytest.raises(UserError, match=r"quantizing needs nvidia-modelopt and transformers .*pip install"):
        quantize_checkpoint(source, "fp8", tmp_path / "out")
    assert only_source_is_left(tmp_path)


def test_unseen_experts_are_listed_by_layer():
    coverage = Coverage(expert_tokens={"layers.0": torch.tensor([3, 0, 1, 0]), "layers.1": torch.tensor([1, 1, 1, 1])})
    assert coverage.unseen_experts == {"layers.0": [1, 3]}
