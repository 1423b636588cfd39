"""Text out of tokens that arrive canvas by canvas: half characters, stop strings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dgemma_trt.runtime.text_stream import TextStream

TEXT = "naïve ☕€ — 日本語 👩‍🚀🏳️‍🌈 end"


def byte_fallback() -> Tokenizer:
    """Like Gemma's: what is not in the vocabulary becomes one token a UTF-8 byte."""
    words = ["<pad>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefghijklmnopqrstuvwxyz▁日"]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def byte_level() -> Tokenizer:
    words = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("make", [byte_fallback, byte_level])
def test_characters_split_across_canvases_are_held_back_until_whole(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<end>", special=True)])
    ids = [token for part in TEXT.split("e") for token in (*tokenizer.encode(part).ids, 0, *tokenizer.encode("e").ids)][:-2]
    assert tokenizer.decode(ids) == TEXT
    for size in range(1, 12):
        stream = TextStream(tokenizer.decode)
        pieces = [stream.add(ids[start : start + size]) for start in range(0, len(ids), size)]
        assert "".join(pieces) == TEXT
        assert all(TEXT.startswith("".join(pieces[:count])) for count in range(len(pieces)))


def test_half_a_character_at_the_end_of_the_answer_is_not_lost() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer.decode)
    assert stream.add(tokenizer.encode("ab☕").ids[:-1]) == "ab"
    assert stream.add([], last=True) == "\N{REPLACEMENT CHARACTER}"


@given(
    text=st.text("ab☕", max_size=24),
    stops=st.lists(st.text("ab☕", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 5), max_size=30),
)
def test_a_stop_string_cuts_the_same_text_however_the_tokens_come(text: str, stops: list[str], cuts: list[int]) -> None:
    """The expected text by the definition: read character by character, the answer ends with the first complete stop string."""
    read = next((text[:n] for n in range(len(text) + 1) if text[:n].endswith(tuple(stops))), None)
    expected = text if read is None else read[: -max(len(stop) for stop in stops if read.endswith(stop))]
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids
    stream, pieces, used = TextStream(tokenizer.decode, stops), [], 0
    for size in [*cuts, len(ids)]:
        taken = ids[:size]
        ids = ids[size:]
        pieces.append(stream.add(taken))
        assert (expected + "~").startswith("".join(pieces)), "nothing may be given out that the stop string then takes back"
        used += stream.tokens_before_stop(taken) if stream.stopped else len(taken)
        if stream.stopped:
            break
    else:
        pieces.append(stream.add([], last=True))
    assert "".join(pieces) == expected
    assert stream.stopped == (read is not None)
    if read is not None:
        assert tokenizer.decode(tokenizer.encode(text).ids[:used]) == read
