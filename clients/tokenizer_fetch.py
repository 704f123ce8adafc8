"""Puts the files of GetTokenizer together from its chunks.

chunk 0: digest, files [(name, size), ...], data      chunk 1..: data
data of all chunks = the files' contents, one after the other
"""

from __future__ import annotations

from clients.connection import StreamCall
from clients.errors import InternalError
from clients.types import TokenizerBundle
from protos import engine_pb2


async def read_tokenizer(
    call: StreamCall[engine_pb2.TokenizerChunk], *, known_digest: str
) -> TokenizerBundle | None:
    """None: `known_digest` is still the current one. Raises InternalError for a torn answer."""
    first = await call.read()
    if first is None or not first.digest:
        raise InternalError("the engine sent no tokenizer")
    sizes = {file.name: file.size_bytes for file in first.files}
    if len(sizes) != len(first.files):
        raise InternalError("the engine sent two tokenizer files of one name")
    data = await _rest_of_data(call, first.data, expected_bytes=sum(sizes.values()))
    if not sizes and first.digest == known_digest:
        return None
    files: dict[str, bytes] = {}
    start = 0
    for name, size_bytes in sizes.items():
        files[name] = data[start : start + size_bytes]
        start += size_bytes
    return TokenizerBundle(first.digest, files)


async def _rest_of_data(
    call: StreamCall[engine_pb2.TokenizerChunk], start: bytes, *, expected_bytes: int
) -> bytes:
    data = bytearray(start)
    while len(data) <= expected_bytes and (chunk := await call.read()) is not None:
        data += chunk.data
    if len(data) != expected_bytes:
        raise InternalError(
            f"the engine sent {len(data)} bytes of tokenizer files and announced {expected_bytes}"
        )
    return bytes(data)
