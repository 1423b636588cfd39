"""Fixtures that several test files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# The tests' tensors are tiny: a second thread costs more than it brings, above all when both cores are taken.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder of the nano architecture before training, with its tokenizer."""
    from dgemma_trt.nano.train import new_model, save_checkpoint

    folder = tmp_path_factory.mktemp("untrained") / "nano"
    torch.manual_seed(0)
    save_checkpoint(new_model(), folder)
    return folder


@pytest.fixture(scope="session")
def engine_folder(untrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 engine directory of the untrained nano for sm120, of at most 128 positions."""
    from dgemma_trt.build.network import NetworkOptions
    from dgemma_trt.build.pipeline import build_engine
    from dgemma_trt.checkpoint import Checkpoint

    out = tmp_path_factory.mktemp("engines") / "untrained"
    options = NetworkOptions(max_batch=2, max_context=128, prefill_chunk=32, canvas_length=32)
    build_engine(Checkpoint(untrained), ["sm120"], out, options, replace=False, progress=lambda _: None)
    return out
