"""The model's own text files, as facades fetch them by GetTokenizer.

The digest is SHA-256 over, for each file in order of name: len(name) name len(content) content,
lengths as little-endian uint64. So facade and engine can never disagree about a tokenizer.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from protos import engine_pb2 as pb

FILE_NAMES: Final = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)  # those that the model has, in this order

CHUNK_BYTES: Final = 1 << 20


class TokenizerFiles:
    """Read once: what is served stays what this process started with."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = dict(sorted(files.items()))
        self.digest = _digest(self._files)

    @classmethod
    def read(cls, model_dir: Path) -> TokenizerFiles:
        paths = [model_dir / name for name in FILE_NAMES]
        return cls({path.name: path.read_bytes() for path in paths if path.is_file()})

    def content(self, name: str) -> bytes | None:
        return self._files.get(name)

    def chunks(self, known_digest: str) -> Iterator[pb.TokenizerChunk]:
        """The digest and file list, then the contents; who has them gets the digest alone."""
        if known_digest == self.digest:
            yield pb.TokenizerChunk(digest=self.digest)
            return
        listing = [
            pb.TokenizerFile(name=name, size_bytes=len(content))
            for name, content in self._files.items()
        ]
        yield pb.TokenizerChunk(digest=self.digest, files=listing)
        for content in self._files.values():
            for start in range(0, len(content), CHUNK_BYTES):
                yield pb.TokenizerChunk(data=content[start : start + CHUNK_BYTES])


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in files.items():
        for part in (name.encode(), content):
            digest.update(struct.pack("<Q", len(part)))
            digest.update(part)
    return digest.hexdigest()
