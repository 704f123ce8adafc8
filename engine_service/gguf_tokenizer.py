"""The tokenizer part of a GGUF import: tokens and merges become a `tokenizer.json`.

A GGUF names the text splitting rule (`tokenizer.ggml.pre`) but does not carry it, so only rules
that are known here by name are imported; guessing would yield other token ids without a word.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from engine_service.gguf_metadata import GgufFile
from engine_service.model_error import ModelError

# Values of `tokenizer.ggml.token_type`.
_CONTROL_TOKEN = 3
_USER_DEFINED_TOKEN = 4

# Key of the GGUF, name in tokenizer_config.json.
_SPECIAL_TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token",
    "tokenizer.ggml.eos_token_id": "eos_token",
    "tokenizer.ggml.unknown_token_id": "unk_token",
    "tokenizer.ggml.padding_token_id": "pad_token",
}


def check_tokenizer(gguf: GgufFile) -> None:
    """Raises `ModelError` for a tokenizer that could not be rebuilt exactly."""
    model = gguf.string("tokenizer.ggml.model")
    pre = gguf.string("tokenizer.ggml.pre") if gguf.has("tokenizer.ggml.pre") else "default"
    if (model, pre) != ("gpt2", "smollm"):
        raise ModelError(
            f"{gguf.path.name} has a {model}/{pre} tokenizer; only gpt2/smollm can be imported. "
            "Use the model's safetensors directory in place of its GGUF."
        )
    for key in ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"):
        if gguf.has(key) and gguf.boolean(key):
            raise ModelError(f"{gguf.path.name}: {key} is set, which the smollm tokenizer has not.")


def write_tokenizer(gguf: GgufFile, out_dir: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokens = gguf.strings("tokenizer.ggml.tokens")
    _build(gguf, tokens).save(str(out_dir / "tokenizer.json"))
    special = {
        name: tokens[gguf.integer(key)] for key, name in _SPECIAL_TOKENS.items() if gguf.has(key)
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.integer("llama.context_length"),
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (out_dir / "tokenizer_config.json").write_text(text, encoding="utf-8")
    if gguf.has("tokenizer.chat_template"):
        template = gguf.string("tokenizer.chat_template")
        (out_dir / "chat_template.jinja").write_text(template, encoding="utf-8")


def _build(gguf: GgufFile, tokens: list[str]) -> Tokenizer:
    token_types = gguf.integers("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in gguf.strings("tokenizer.ggml.merges")]
    pairs = [(merge[0], merge[1]) for merge in merges if len(merge) == 2]
    if len(pairs) != len(merges) or len(token_types) != len(tokens):
        raise ModelError(f"{gguf.path.name}: the tokenizer's tokens, types and merges disagree.")
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, token_types, strict=True):
        if token_type == _CONTROL_TOKEN:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED_TOKEN:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer
