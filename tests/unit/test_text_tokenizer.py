"""A model's files become a tokenizer or a clear error, and every token has its true bytes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders

from clients.text import InvalidText, Tokenizer, TokenizerFilesError
from tests.text_samples import (
    HARD_TEXT,
    byte_level_backend,
    embedded_files,
    embedded_tokenizer,
    fallback_backend,
    metaspace_backend,
    token_id_of,
)


def minimal_files(**config: object) -> dict[str, bytes]:
    return {
        "tokenizer.json": byte_level_backend().to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"no tokenizer\.json"),
        ({"tokenizer.json": b""}, r"tokenizer\.json is not a tokenizer"),
        ({"tokenizer.json": b"{}"}, r"tokenizer\.json is not a tokenizer"),
        ({"tokenizer.json": b"\xff\x00"}, r"tokenizer\.json is not a tokenizer"),
        (minimal_files() | {"tokenizer_config.json": b"{"}, "tokenizer_config.json is not valid"),
        (minimal_files() | {"tokenizer_config.json": b"[]"}, "does not hold a JSON object"),
        (minimal_files() | {"tokenizer_config.json": b"\xff"}, "is not valid UTF-8"),
        (minimal_files() | {"special_tokens_map.json": b"["}, r"special_tokens_map\.json is not"),
        (minimal_files() | {"chat_template.jinja": b"{% if"}, r"chat_template\.jinja: .*line 1"),
        (minimal_files(chat_template=5), "neither a string nor a list"),
        (minimal_files(chat_template=[{"name": "default"}]), "neither a string nor a list"),
        (minimal_files(chat_template=[{"name": "rag", "template": ""}]), "named default"),
        (minimal_files(chat_template="{{ x"), r"tokenizer_config\.json: .*line 1"),
        (minimal_files(eos_token=7), "eos_token is not a string"),
    ],
)
def test_broken_files_are_named(files: dict[str, bytes], message: str) -> None:
    with pytest.raises(TokenizerFilesError, match=message):
        Tokenizer.from_files(files)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (None, "has no decoder"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Fuse(), "Fuse"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.CTC()]), "ByteLevel together with CTC"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip("x", 1, 0)]), "Strip"),
        (
            decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 1)]
            ),
            "Strip of anything but leading spaces",
        ),
    ],
)
def test_a_decoder_of_another_kind_is_refused(
    decoder: decoders.Decoder | None, message: str
) -> None:
    backend = metaspace_backend()
    backend.decoder = decoder
    with pytest.raises(TokenizerFilesError, match=message):
        Tokenizer.from_files({"tokenizer.json": backend.to_str().encode()})


def test_special_tokens_come_from_the_config_then_the_older_map() -> None:
    files = minimal_files(
        bos_token={"content": "<think>", "lstrip": False}, eos_token="</s>", pad_token=None
    )
    files["special_tokens_map.json"] = json.dumps(
        {"eos_token": "older", "pad_token": "older", "unk_token": "<unk>"}
    ).encode()
    tokenizer = Tokenizer.from_files(files)
    assert tokenizer.special_tokens == {
        "bos_token": "<think>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    # A token with such a name is special, whatever tokenizer.json says.
    assert tokenizer.is_special(tokenizer.encode("<think>")[0])


def test_templates_by_name_and_by_file() -> None:
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "in the config {{ eos_token }}"},
    ]
    files = minimal_files(chat_template=named, eos_token="</s>")
    user = [{"role": "user", "content": "hi"}]
    template = Tokenizer.from_files(files).chat_template
    assert template is not None
    assert template.render(user) == "in the config </s>"
    assert template.render(user, tools=[{"type": "function"}]) == "tools"

    files["chat_template.jinja"] = b"in its file"
    template = Tokenizer.from_files(files).chat_template
    assert template is not None
    assert template.render(user) == "in its file"

    assert Tokenizer.from_files(minimal_files()).chat_template is None


def test_truncation_and_padding_of_the_file_do_not_apply() -> None:
    backend = byte_level_backend()
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_files({"tokenizer.json": backend.to_str().encode()})
    assert len(tokenizer.encode("abc")) == 3
    assert len(tokenizer.encode("a")) == 1


# ---------------------------------------------------------------- tokens


def test_every_byte_of_a_byte_level_tokenizer() -> None:
    tokenizer = Tokenizer(byte_level_backend())
    assert {tokenizer.token_bytes(token_id) for token_id in range(256)} == {
        bytes([byte]) for byte in range(256)
    }


def test_an_added_token_stands_for_itself() -> None:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("é", normalized=False), AddedToken("｜a▁b｜", normalized=False)])
    tokenizer = Tokenizer(backend)
    for text in ("é", "｜a▁b｜", "<think>"):
        (token_id,) = tokenizer.encode(text)
        assert tokenizer.token_bytes(token_id) == text.encode()
        assert tokenizer.token_text(token_id) == tokenizer.decode([token_id]) == text


def test_bytes_of_a_sentencepiece_tokenizer() -> None:
    backend = fallback_backend(strip=True)
    tokenizer = Tokenizer(backend)
    for token, expected in {
        "<0x00>": b"\x00",
        "<0xE4>": b"\xe4",
        "▁Hello": b" Hello",
        "▁▁": b"  ",
        "漢": "漢".encode(),
        "</s>": b"</s>",
    }.items():
        assert tokenizer.token_bytes(token_id_of(backend, token)) == expected


def test_byte_tokens_are_plain_text_without_byte_fallback() -> None:
    backend = metaspace_backend()
    backend.add_tokens(["<0x41>"])
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b"<0x41>"


def test_the_space_that_encoding_adds_is_taken_off_a_whole_text_only() -> None:
    backend = metaspace_backend()
    tokenizer = Tokenizer(backend)
    ids = [token_id_of(backend, token) for token in ("▁Hello", "▁world")]
    assert backend.decode(ids) == "Hello world"
    assert tokenizer.decode(ids) == "Hello world"
    assert tokenizer.token_bytes(ids[0]) == b" Hello"
    backend = fallback_backend(strip=True)
    assert Tokenizer(backend).decode([token_id_of(backend, "▁▁")]) == " "


def test_pieces_of_characters_look_different(embedded_model_dir: Path) -> None:
    tokenizer = embedded_tokenizer(embedded_model_dir)
    pieces = [i for i in tokenizer.encode(HARD_TEXT) if b"\xf0" in tokenizer.token_bytes(i)[:1]]
    shown = {tokenizer.token_text(token_id) for token_id in pieces}
    assert len(shown) == len(set(pieces)) > 0
    assert all(text.startswith("bytes:\\xf0") for text in shown)


@pytest.mark.parametrize("token_id", [-1, 258, 10**6, 2**40])
def test_an_id_that_is_no_token_is_empty(token_id: int) -> None:
    tokenizer = Tokenizer(byte_level_backend())
    assert tokenizer.vocab_size == 258
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.token_text(token_id) == ""
    assert tokenizer.decode([token_id]) == ""
    assert not tokenizer.is_special(token_id)


def test_a_lone_surrogate_is_refused(embedded_model_dir: Path) -> None:
    with pytest.raises(InvalidText, match="surrogate"):
        embedded_tokenizer(embedded_model_dir).encode("a\ud800b")


def test_threads_share_one_tokenizer(embedded_model_dir: Path) -> None:
    tokenizer = embedded_tokenizer(embedded_model_dir)
    texts = [f"{HARD_TEXT} {number} " * 20 for number in range(16)]
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(tokenizer.encode, texts))
        assert list(pool.map(tokenizer.decode, ids)) == texts
    fresh = embedded_tokenizer(embedded_model_dir)
    assert ids == [fresh.encode(text) for text in texts]


def test_the_embedded_model_has_its_template(embedded_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_files(embedded_files(embedded_model_dir))
    assert tokenizer.chat_template is not None
    rendered = tokenizer.chat_template.render([{"role": "system", "content": "S"}])
    assert rendered == "<|im_start|>system\nS<|im_end|>\n<|im_start|>assistant\n"
