"""Where a checkpoint named on the command line lies: a folder, the bundled nano, or the Hugging Face Hub."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from dgemma_trt.errors import UserError

NANO = "nano"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def find_checkpoint(name: str) -> Path:
    """The folder of a checkpoint: a path, `nano`, or a Hugging Face id such as org/name, which is fetched.

    Raises:
        UserError: no such folder, or the id cannot be fetched.
    """
    if not name:
        raise UserError("no checkpoint or engine is named; give a folder, 'nano' or a Hugging Face id")
    folder = Path(name)
    if folder.exists():
        return folder
    if name == NANO:
        return Path(str(resources.files("dgemma_trt.nano") / "checkpoint"))
    if not HUB_ID.fullmatch(name):
        raise UserError(f"{name}: no such folder; give a checkpoint folder, 'nano' or a Hugging Face id such as org/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=WANTED))
    except Exception as error:  # the hub raises a dozen unrelated types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{name}: no such folder, and not to be had from the Hugging Face Hub: {reason}") from None
