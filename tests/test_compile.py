"""TensorRT for RTX compiles the emitted networks here, without a GPU, for the targets that can run them."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import tensorrt_rtx as trt
from random_weights import RandomWeights, tiny_config

from dgemma_trt.build.compile import compile_engine
from dgemma_trt.build.network import Emitted, NetworkOptions, emit
from dgemma_trt.build.targets import TARGETS, check
from dgemma_trt.errors import UserError
from dgemma_trt.weights import Precision

OPTIONS = NetworkOptions(max_batch=2, max_context=64, prefill_chunk=16, canvas_length=8)


def emitted_for(precision: Precision, **options: object) -> Emitted:
    return emit(RandomWeights(tiny_config(), precision), replace(OPTIONS, **options), trt)  # type: ignore[arg-type]


def matmul_types(engine: bytes) -> dict[str, tuple[str, ...]]:
    """Types of both operands and the result of every matmul, by name, from the program that an engine file holds as text.

    Nothing documents it, so the file of another version of TensorRT for RTX may look different.
    """
    text = engine.decode("latin-1")
    types = dict(re.findall(r'tensor=\{ [^\n]*? name="([^"]+)" [^\n]* type=(\w+) \}', text))
    found: dict[str, tuple[str, ...]] = {}
    for name, output, inputs in re.findall(r'fully_connected=\{ name="([^"]+)" output=\{"([^"]+)" \} input=\{([^}]*)\}', text):
        first, second, *_ = re.findall(r'"([^"]+)"', inputs)
        found[name.rpartition("/")[0]] = (types[first], types[second], types[output])
    return found


@pytest.mark.parametrize(
    ("precision", "target", "types"),
    [
        (Precision.BF16, "sm120", ("bf16", "bf16", "bf16")),
        (Precision.FP8, "sm89", ("fp8_e4m3", "fp8_e4m3", "float")),
        (Precision.FP8, "sm120", ("fp8_e4m3", "fp8_e4m3", "float")),
        (Precision.FP8_STATIC, "sm89", ("fp8_e4m3", "fp8_e4m3", "float")),
        (Precision.NVFP4, "sm121", ("fp4_e2m1", "fp4_e2m1", "float")),
        (Precision.NVFP4_WEIGHTS, "sm120", ("bf16", "bf16", "bf16")),
    ],
)
def test_every_matmul_is_compiled_in_its_precision(
    precision: Precision, target: str, types: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    emitted = emitted_for(precision)
    compile_engine(emitted, TARGETS[target], tmp_path / "engine")
    found = matmul_types((tmp_path / "engine").read_bytes())
    matmuls = {name.removesuffix(".weight") for name in emitted.weight_inputs if name.endswith("_proj.weight")}
    assert {name: found[name] for name in matmuls} == dict.fromkeys(matmuls, types)
    assert found["layers.0.router"] == ("float", "float", "float")
    assert not emitted.log.errors and not emitted.log.warnings
    assert capfd.readouterr() == ("", "")


def test_more_outputs_and_a_large_vocabulary(tmp_path: Path) -> None:
    weights = RandomWeights(tiny_config(vocab_size=1500))
    emitted = emit(weights, replace(OPTIONS, top_logprobs=True, debug_logits=True, window_rule="per-token"), trt)
    compile_engine(emitted, TARGETS["sm120"], tmp_path / "engine")
    assert (tmp_path / "engine").stat().st_size > 0


def test_embedded_weights(tmp_path: Path) -> None:
    emitted = emitted_for(Precision.NVFP4, embed_weights=True)
    compile_engine(emitted, TARGETS["sm120"], tmp_path / "engine")
    stored = emitted.constants["layers.0.mlp.gate_proj.weight"].numpy().tobytes()
    assert stored in (tmp_path / "engine").read_bytes()


def test_one_network_serves_several_targets(tmp_path: Path) -> None:
    emitted = emitted_for(Precision.BF16)
    phases: list[str] = []
    for target in check({Precision.BF16}, ["sm80", "sm86", "sm80"]):
        compile_engine(emitted, target, tmp_path / target.name, phases.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sm80", "sm86"]
    assert phases.count("Building engine") == 2 and "Optimizing graph" in phases


# What does not work


def test_tensorrt_s_reason_is_in_the_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"for sm89: .*fp4_e2m1") as caught:
        compile_engine(emitted_for(Precision.NVFP4), TARGETS["sm89"], tmp_path / "engine")
    assert "\n" not in str(caught.value) and "catchCudaError" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no/engine: cannot be written: No such file"):
        compile_engine(emitted_for(Precision.BF16), TARGETS["sm120"], tmp_path / "no" / "engine")


def test_ctrl_c_stops_the_build(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupt(phase: str) -> None:
        if phase == "Optimizing graph":
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        compile_engine(emitted_for(Precision.BF16), TARGETS["sm120"], tmp_path / "engine", interrupt)
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGINT) is before


def test_what_progress_raises_is_raised(tmp_path: Path) -> None:
    def fail(phase: str) -> None:
        raise ValueError(phase)

    with pytest.raises(ValueError, match="Building engine"):
        compile_engine(emitted_for(Precision.BF16), TARGETS["sm120"], tmp_path / "engine", fail)
    assert not list(tmp_path.iterdir())


# Targets


def test_targets_that_fit_come_back_once_and_in_order() -> None:
    assert [target.name for target in check({Precision.BF16, Precision.FP8}, ["sm120", "sm89", "sm120"])] == ["sm120", "sm89"]


@pytest.mark.parametrize(
    ("precisions", "names", "message"),
    [
        ({Precision.BF16}, ["sm120", "sm90"], r"unknown target 'sm90'; known are sm80 .*sm121 \(DGX Spark\)"),
        (
            {Precision.BF16, Precision.FP8},
            ["sm86"],
            r"sm86 \(.*\) cannot compute fp8, .* build for sm89, sm120, sm121.*\(bf16\)",
        ),
        ({Precision.NVFP4}, ["sm120", "sm89"], r"sm89 .* cannot compute nvfp4, .* sm120, sm121, .*\(bf16, fp8\)"),
    ],
)
def test_targets_that_do_not_fit(precisions: set[Precision], names: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(precisions, names)
