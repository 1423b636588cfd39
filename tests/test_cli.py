"""The command line: what it prints, its exit codes, and that bad input leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from dgemma_trt.cli import main
from dgemma_trt.engine import Engine
from dgemma_trt.errors import UserError
from dgemma_trt.files import new_folder

FEW_STEPS = ["--max-denoising-steps", "2", "--max-new-tokens", "8"]


def invoke(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def assert_one_clear_line(result: Result, *named: str) -> None:
    assert result.exit_code == 1, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.output
    for text in named:
        assert text in lines[0]


@pytest.fixture
def damaged(untrained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untrained, tmp_path / "damaged"))


def test_run_prints_an_answer_and_says_where_it_ran(engine_folder: Path) -> None:
    result = invoke("run", "--engine", engine_folder, "--prompt", "Hello", *FEW_STEPS)
    assert result.exit_code == 0, result.output
    assert "host session" in result.stderr
    assert result.stdout.endswith("\n")


def test_json_gives_one_object_a_line_and_repeats_with_the_seed(engine_folder: Path) -> None:
    arguments: list[str | Path] = ["run", "--engine", engine_folder, "--json", *FEW_STEPS, "--prompt", "One", "--prompt", "Two"]
    first, again, other = (invoke(*arguments, "--seed", seed) for seed in ("3", "3", "4"))
    answers = [json.loads(line) for line in first.stdout.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["One", "Two"]
    assert all(len(answer["token_ids"]) <= 8 for answer in answers)
    assert first.stdout == again.stdout != other.stdout


def test_the_prompt_may_come_from_standard_input(engine_folder: Path) -> None:
    piped = invoke("run", "--engine", engine_folder, "--json", *FEW_STEPS, stdin="Hello")
    given = invoke("run", "--engine", engine_folder, "--json", *FEW_STEPS, "--prompt", "Hello")
    assert piped.stdout == given.stdout


def test_watch_without_a_terminal_prints_a_line_a_step(engine_folder: Path) -> None:
    result = invoke("run", "--engine", engine_folder, "--prompt", "Hello", "--watch", *FEW_STEPS)
    assert result.exit_code == 0, result.output
    assert [line.split(":")[0] for line in result.stdout.splitlines()[:2]] == [
        "canvas 1, step  1 of at most 2",
        "canvas 1, step  2 of at most 2",
    ]
    assert "\x1b" not in result.stdout


def test_a_checkpoint_folder_runs_like_its_engine(untrained: Path, engine_folder: Path) -> None:
    parameters: dict[str, Any] = {"max_new_tokens": 40, "max_denoising_steps": 3, "seed": 5}
    from_checkpoint = Engine.open(untrained, "cpu").generate(["Hello"], **parameters)
    from_engine = Engine.open(engine_folder, "cpu").generate(["Hello"], **parameters)
    assert from_checkpoint[0].token_ids == from_engine[0].token_ids


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "--engine", "x", "--max-new-tokens", "0", "--prompt", "x"],
        ["run", "--engine", "x", "--watch", "--json", "--prompt", "x"],
        ["quantize", "nano", "--quant", "int3", "--out", "x"],
        ["build", "nano"],
        ["run", "--engine", "x", "--prompt", "-", "--prompt", "-"],
        ["paint"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 2


def test_help_does_not_load_torch() -> None:
    code = "import sys, dgemma_trt.cli as cli; cli.main(['--help'], standalone_mode=False); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("command", ["run", "build", "quantize"])
def test_a_folder_that_does_not_exist(command: str, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    commands: dict[str, list[str | Path]] = {
        "run": ["run", "--engine", absent, "--prompt", "x"],
        "build": ["build", absent, "--target", "sm120", "--out", tmp_path / "out"],
        "quantize": ["quantize", absent, "--quant", "fp8", "--out", tmp_path / "out"],
    }
    assert_one_clear_line(invoke(*commands[command]), "absent", "no such folder")
    assert os.listdir(tmp_path) == []


def test_a_folder_without_config_json(damaged: Path) -> None:
    (damaged / "config.json").unlink()
    assert_one_clear_line(invoke("run", "--engine", damaged, "--prompt", "x"), "config.json", "no such file")


def test_another_model_type(damaged: Path, tmp_path: Path) -> None:
    config = json.loads((damaged / "config.json").read_text()) | {"model_type": "llama"}
    (damaged / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    assert_one_clear_line(invoke("build", damaged, "--target", "sm120", "--out", out), "model_type", "'llama'")
    assert os.listdir(tmp_path) == ["damaged"]


def test_a_truncated_file(damaged: Path, tmp_path: Path) -> None:
    path = damaged / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    result = invoke("build", damaged, "--target", "sm120", "--out", tmp_path / "out")
    assert_one_clear_line(result, "model.safetensors", "truncated")
    assert os.listdir(tmp_path) == ["damaged"]


def test_a_missing_tensor(damaged: Path) -> None:
    tensors = load_file(damaged / "model.safetensors")
    del tensors["model.decoder.layers.3.router.scale"]
    save_file(tensors, damaged / "model.safetensors")
    assert_one_clear_line(invoke("run", "--engine", damaged, "--prompt", "x"), "layers.3.router.scale")


@pytest.mark.parametrize("name", ["sm120.engine", "weights/layers.0.safetensors", "tokenizer.json"])
def test_an_engine_directory_with_a_changed_file(name: str, engine_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(engine_folder, tmp_path / "engine"))
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    assert_one_clear_line(invoke("run", "--engine", folder, "--prompt", "x"), name, "changed")
    (folder / name).write_bytes(content[:-1])
    assert_one_clear_line(invoke("run", "--engine", folder, "--prompt", "x"), name, "bytes")
    (folder / name).unlink()
    assert_one_clear_line(invoke("run", "--engine", folder, "--prompt", "x"), name, "missing")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("limits", {}),
        ("limits", [1]),
        ("format_version", 99),
        ("files", {"tokenizer.json": 1}),
        ("model", {}),
        ("precisions", None),
        ("surplus", 1),
        ("files", {}),
        ("window_rule", "zzz"),
        ("precisions", {}),
        ("limits", {"max_batch": 1, "max_context": 64, "prefill_chunk": 32, "canvas_length": -1}),
        ("limits", {"max_batch": 1, "max_context": 10**12, "prefill_chunk": 32, "canvas_length": 32}),
        ("engines", {"sm120": ["nested"]}),
        ("generation", {"t_max": 5.0}),
        ("network_fingerprint", ""),
    ],
)
def test_a_manifest_that_is_not_one(field: str, value: Any, engine_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(engine_folder, tmp_path / "engine"))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, field: value}))
    assert_one_clear_line(invoke("run", "--engine", folder, "--prompt", "x"), "manifest.json")


def test_a_manifest_whose_model_was_changed(engine_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(engine_folder, tmp_path / "engine"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["model"]["text_config"]["vocab_size"] += 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert_one_clear_line(invoke("run", "--engine", folder, "--prompt", "x"), "manifest.json", "changed")


def test_a_manifest_that_points_outside_its_folder(engine_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(engine_folder, tmp_path / "engine"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../secret"] = {"sha256": "0", "bytes": 1}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert_one_clear_line(invoke("run", "--engine", folder, "--prompt", "x"), "../secret", "outside")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--entropy-bound", "nan"),
        ("--entropy-bound", "-1"),
        ("--temperature", "inf"),
        ("--temperature", "1e-40"),
        ("--seed", str(2**64)),
        ("--max-denoising-steps", "1" + 30 * "0"),
    ],
)
def test_parameters_outside_their_range(option: str, value: str, engine_folder: Path) -> None:
    named = option.strip("-").replace("-", "_")
    assert_one_clear_line(invoke("run", "--engine", engine_folder, "--prompt", "x", option, value), named)


def test_input_that_is_not_text(engine_folder: Path) -> None:
    result = CliRunner().invoke(main, ["run", "--engine", str(engine_folder)], input=b"\xff\xfe")
    assert_one_clear_line(result, "UTF-8")
    assert_one_clear_line(invoke("run", "--engine", engine_folder, "--prompt", "a\udcffb"), "UTF-8")


@pytest.mark.parametrize("prompt", [None, [1.5], ["a", {"role": "user"}], [True]])
def test_a_prompt_of_no_known_kind(prompt: Any, engine_folder: Path) -> None:
    with pytest.raises(UserError, match="prompt"):
        Engine.open(engine_folder, "cpu").generate([prompt])


def test_termination_leaves_nothing(untrained: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "dgemma_trt.cli",
        "build",
        str(untrained),
        "--target",
        "sm120",
        "--out",
        str(tmp_path / "out"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not os.listdir(tmp_path) and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)
    process.terminate()
    assert process.wait(timeout=120) == 143
    assert os.listdir(tmp_path) == []


def test_a_prompt_longer_than_the_limit(engine_folder: Path) -> None:
    assert_one_clear_line(invoke("run", "--engine", engine_folder, "--prompt", "x" * 200), "128", "--max-context")


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt(prompt: str, engine_folder: Path) -> None:
    assert_one_clear_line(invoke("run", "--engine", engine_folder, "--prompt", prompt), "empty")


def test_a_target_that_does_not_exist(untrained: Path, tmp_path: Path) -> None:
    result = invoke("build", untrained, "--target", "sm120,sm999", "--out", tmp_path / "out")
    assert_one_clear_line(result, "sm999", "sm120")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("target", ["", ","])
def test_no_target_at_all(target: str, untrained: Path, tmp_path: Path) -> None:
    assert_one_clear_line(invoke("build", untrained, "--target", target, "--out", tmp_path / "out"), "sm120")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", [["build", "--target", "sm120"], ["quantize", "--quant", "fp8"]])
def test_an_engine_directory_where_a_checkpoint_is_wanted(command: list[str], engine_folder: Path, tmp_path: Path) -> None:
    result = invoke(*command, engine_folder, "--out", tmp_path / "out")
    assert_one_clear_line(result, "is an engine directory")


def test_an_output_folder_that_cannot_be_written(untrained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = invoke("build", untrained, "--target", "sm120", "--out", tmp_path / "file" / "out")
    assert_one_clear_line(result, "cannot be written")


def test_an_output_folder_that_exists_is_kept(untrained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("mine")
    assert_one_clear_line(invoke("build", untrained, "--target", "sm120", "--out", out), "exists already")
    (out / "config.json").write_text("{}")
    assert_one_clear_line(invoke("build", untrained, "--target", "sm120", "--out", out, "--force"), "not replaced")
    assert (out / "precious").read_text() == "mine"
    (out / "config.json").unlink()
    assert os.listdir(tmp_path) == ["out"]


def test_the_checkpoint_is_never_replaced_by_its_engine(damaged: Path) -> None:
    assert_one_clear_line(invoke("build", damaged, "--target", "sm120", "--out", damaged, "--force"), "checkpoint itself")
    assert (damaged / "model.safetensors").exists()


@pytest.mark.parametrize("command", [["build", "--target", "sm120"], ["quantize", "--quant", "fp8"]])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
def test_the_checkpoint_neither_holds_nor_lies_in_the_output(command: list[str], inside: bool, damaged: Path) -> None:
    before = sorted(os.listdir(damaged))
    (damaged.parent / "config.json").write_text("{}")
    out = damaged / "out" if inside else damaged.parent
    assert_one_clear_line(invoke(*command, damaged, "--out", out, "--force"), "checkpoint itself")
    assert sorted(os.listdir(damaged)) == before
    assert sorted(os.listdir(damaged.parent)) == ["config.json", "damaged"]


def test_an_output_that_is_a_link_means_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for text in ("first", "second"):
        with new_folder(tmp_path / "link", replace=True, source=tmp_path / "source") as folder:
            (folder / "config.json").write_text(f'"diffusion_gemma" {text}')
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real" / "config.json").read_text().endswith(text)
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with (
        pytest.raises(UserError, match="leads to itself"),
        new_folder(tmp_path / "circle", replace=True, source=tmp_path / "x"),
    ):
        pass


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="meanwhile"),
        new_folder(tmp_path / "out", replace=False, source=tmp_path / "source"),
    ):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "precious").write_text("mine")
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == ["precious"]


def test_a_full_disk_is_one_clear_line(untrained: Path, tmp_path: Path) -> None:
    command = (
        f"ulimit -f 100; exec {sys.executable} -m dgemma_trt.cli build {untrained} --target sm120 --out {tmp_path / 'out'}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "cannot be written" in line] == done.stderr.splitlines()[-1:]
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_terminal_without_unicode_or_standard_input(engine_folder: Path) -> None:
    run = f"{sys.executable} -m dgemma_trt.cli run --engine {engine_folder}"
    ascii_only = subprocess.run(
        ["bash", "-c", f"PYTHONIOENCODING=ascii {run} --watch --prompt x {' '.join(FEW_STEPS)}"],
        capture_output=True,
        check=False,
    )
    assert ascii_only.returncode == 0, ascii_only.stderr
    closed = subprocess.run(["bash", "-c", f"{run} <&-"], capture_output=True, text=True, check=False)
    assert closed.returncode == 1 and "standard input" in closed.stderr and "Traceback" not in closed.stderr


def test_the_current_folder_as_output_leaves_nothing_else(
    untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    result = invoke("build", untrained, "--target", "sm120", "--out", ".", "--force", "--max-context", "64")
    assert result.exit_code == 0, result.output
    assert os.listdir(tmp_path) == ["here"]
    assert (here / "manifest.json").exists()


def test_a_context_beyond_the_models_positions(untrained: Path, tmp_path: Path) -> None:
    result = invoke("build", untrained, "--target", "sm120", "--out", tmp_path / "out", "--max-context", "5000")
    assert_one_clear_line(result, "5000", "4096")
