"""The nano checkpoint's tokenizer: one token a character, bytes for the rest, Gemma 4's own ids for special tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

VOCAB_SIZE = 384
SPECIAL_TOKENS = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>",
    49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>",
    100: "<|channel>", 101: "<channel|>", 105: "<|turn>", 106: "<turn|>",
}  # fmt: skip
FIRST_BYTE_ID = 128

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}"
    "{{ message['content'] | trim }}{{ '<turn|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """The tokenizer: ids 0 … 127 hold special tokens and single characters, 128 … 383 the 256 bytes."""
    vocabulary = {text: token for token, text in SPECIAL_TOKENS.items()}
    free = iter(token for token in range(FIRST_BYTE_ID) if token not in SPECIAL_TOKENS)
    for character in "\n" + "".join(map(chr, range(32, 127))):
        vocabulary[character] = next(free)
    vocabulary |= {f"<unused{token}>": token for token in free}
    vocabulary |= {f"<0x{byte:02X}>": FIRST_BYTE_ID + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for _, text in sorted(SPECIAL_TOKENS.items())])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n", encoding="utf-8")
