"""The bundled conversations that calibration starts from."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from torch import Tensor, tensor

from dgemma_trt.text import Message, Text


def bundled_chats() -> list[list[Message]]:
    """The conversations of prompts.jsonl beside this file, one a line, each ending with the user's turn."""
    lines = resources.files(__package__).joinpath("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def tokenized_chats(folder: Path) -> list[Tensor]:
    """The bundled conversations by a checkpoint's own tokenizer and chat template: int64 [1, tokens] each.

    Raises:
        UserError: the checkpoint has no tokenizer or no chat template.
    """
    text = Text(folder)
    return [tensor([text.chat(messages)]) for messages in bundled_chats()]
