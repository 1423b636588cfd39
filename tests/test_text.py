"""Tokenizer and chat template against transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dgemma_trt.errors import UserError
from dgemma_trt.sources import find_checkpoint
from dgemma_trt.text import Text

NANO = find_checkpoint("nano")
CONVERSATION = [
    {"role": "user", "content": " What is 1 plus 2? "},
    {"role": "assistant", "content": "3, naïve friend."},
    {"role": "user", "content": "Danke 日本\n!"},
]


def test_chats_are_encoded_as_transformers_does() -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(NANO)
    expected = theirs.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=True)
    assert Text(NANO).chat(CONVERSATION) == list(expected["input_ids"] if hasattr(expected, "keys") else expected)


def test_raw_prompts_begin_with_the_beginning_of_sequence_token() -> None:
    text = Text(NANO)
    assert text.raw("ab")[0] == 2
    assert text.decode(text.raw("naïve 日本")) == "naïve 日本"


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Text(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Text(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((NANO / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="no chat template"):
        Text(tmp_path).chat(CONVERSATION)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match=r"chat_template\.jinja"):
        Text(tmp_path)


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ raise_exception('no') }}", "{{ x | tojson(1, 2, 3) }}"]
)
def test_a_template_that_fails_is_one_clear_error(source: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((NANO / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(UserError, match="chat template refuses"):
        Text(tmp_path).chat(CONVERSATION)


def test_templates_may_ask_for_the_date(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((NANO / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}")
    text = Text(tmp_path)
    assert text.decode(text.chat(CONVERSATION)).startswith("20")
