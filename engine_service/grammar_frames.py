"""What the engine core and its grammar process say to each other, and how it is framed."""

from __future__ import annotations

import enum
import socket
import struct
from typing import Final, TypeVar

import msgspec

_LENGTH: Final = struct.Struct("!I")  # of the msgpack that follows, bytes

T = TypeVar("T")


class GrammarProcessConfig(msgspec.Struct, frozen=True):
    core_pid: int  # whose end is the process's own
    model_dir: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_cpu_seconds: float  # of one compilation
    max_memory_bytes: int  # of one compilation, beyond what all share


class FailureKind(enum.Enum):
    BAD_SOURCE = "bad_source"
    OUT_OF_TIME = "out_of_time"
    OUT_OF_MEMORY = "out_of_memory"
    DIED = "died"


class Compiled(msgspec.Struct, frozen=True, tag=True):
    grammar: str  # as `CompiledGrammar.serialize_json` gives it


class CompileFailed(msgspec.Struct, frozen=True, tag=True):
    kind: FailureKind
    message: str = ""  # what is wrong with a bad source


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def send_payload(to: socket.socket, payload: bytes) -> None:
    """Raises OSError if nobody is there any more."""
    to.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(source: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """The next message; None: the other end is gone. Raises TimeoutError as the socket says."""
    head = _read(source, _LENGTH.size)
    if head is None:
        return None
    payload = _read(source, _LENGTH.unpack(head)[0])
    return None if payload is None else decoder.decode(payload)


def _read(source: socket.socket, num_bytes: int) -> bytes | None:
    parts = bytearray(num_bytes)
    view, num_read = memoryview(parts), 0
    while num_read < num_bytes:
        count = source.recv_into(view[num_read:])
        if count == 0:
            return None
        num_read += count
    return bytes(parts)
