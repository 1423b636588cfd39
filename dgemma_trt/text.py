"""Text in and out: the checkpoint's tokenizer.json and its own chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from dgemma_trt.config import read_json
from dgemma_trt.errors import UserError

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""What a folder holds for its text; the last may instead be the field chat_template of the second."""

Message = dict[str, Any]


class Text:
    """A checkpoint's tokenizer and chat template."""

    def __init__(self, folder: Path) -> None:
        """Reads the files of `folder`.

        Raises:
            UserError: no tokenizer.json, or a file that cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path}: no such file; copy the tokenizer files of the original checkpoint beside the weights")
        try:
            self.tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{path}: cannot be read as a tokenizer: {error}") from None
        settings = folder / "tokenizer_config.json"
        config = read_json(settings) if settings.exists() else {}
        self._special = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        template = folder / "chat_template.jinja"
        try:
            source = template.read_text(encoding="utf-8") if template.exists() else config.get("chat_template")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{template}: cannot be read: {error}") from None
        if isinstance(source, str) and "bos_token" in source and not self._special["bos_token"]:
            raise UserError(f"{settings}: bos_token is missing, and the chat template uses it")
        self._template = _compile(source, template) if isinstance(source, str) else None
        self._folder = folder

    def chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation, ready for the model's answer; `options` are passed to the template.

        Raises:
            UserError: the checkpoint has no chat template, or the template refuses the messages.
        """
        if self._template is None:
            raise UserError(f"{self._folder}: has no chat template; give raw prompts")
        try:
            text = self._template.render(messages=list(messages), add_generation_prompt=True, **self._special, **options)
        except Exception as error:  # a template may do anything that Python's expressions do
            raise UserError(f"the chat template refuses these messages: {error}") from None
        if not text:
            raise UserError(f"{self._folder}: the chat template gives an empty prompt for these messages")
        return self._encode(text)

    def raw(self, prompt: str) -> list[int]:
        """Token ids of a prompt as it stands, after the beginning-of-sequence token."""
        bos = self.tokenizer.token_to_id(self._special["bos_token"]) if self._special["bos_token"] else None
        ids = self._encode(prompt)
        return ids if bos is None else [bos, *ids]

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError("the prompt is not valid UTF-8 text") from None
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text


def _token_text(value: Any) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _compile(source: str, path: Path) -> jinja2.Template:
    # The settings under which chat templates are written: those of transformers' apply_chat_template.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UserError(f"{path}: not a valid chat template: {error}") from None


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
