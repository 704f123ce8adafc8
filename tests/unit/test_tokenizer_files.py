"""GetTokenizer's chunks and digest."""

from __future__ import annotations

from pathlib import Path

from engine_service.tokenizer_files import CHUNK_BYTES, TokenizerFiles


def reassemble(files: TokenizerFiles) -> dict[str, bytes]:
    first, *rest = files.chunks("")
    data = b"".join(chunk.data for chunk in rest)
    assert all(len(chunk.data) <= CHUNK_BYTES for chunk in rest)
    result, start = {}, 0
    for file in first.files:
        result[file.name] = data[start : start + file.size_bytes]
        start += file.size_bytes
    assert start == len(data)
    return result


def test_chunks_carry_all_files() -> None:
    contents = {"tokenizer.json": b"x" * (2 * CHUNK_BYTES + 5), "config.json": b"", "a": b"abc"}
    assert reassemble(TokenizerFiles(contents)) == contents


def test_a_known_digest_gets_the_digest_alone() -> None:
    files = TokenizerFiles({"a": b"abc"})
    (chunk,) = files.chunks(files.digest)
    assert chunk.digest == files.digest
    assert not chunk.files
    assert not chunk.data


def test_the_digest_tells_contents_and_names_apart() -> None:
    variants = [{"a": b"bc"}, {"ab": b"c"}, {"a": b"b", "c": b""}, {"a": b"bd"}, {}]
    assert len({TokenizerFiles(files).digest for files in variants}) == len(variants)
    assert (
        TokenizerFiles({"a": b"1", "b": b"2"}).digest
        == TokenizerFiles({"b": b"2", "a": b"1"}).digest
    )


def test_reading_takes_the_text_files_that_are_there(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors", "notes.txt"):
        (tmp_path / name).write_text(name)
    files = TokenizerFiles.read(tmp_path)
    assert reassemble(files) == {
        "chat_template.jinja": b"chat_template.jinja",
        "tokenizer.json": b"tokenizer.json",
    }
