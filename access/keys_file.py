"""The keys file, YAML or JSON: which keys there are, whose each is, and what it may.

keys:
  - id: reports                  # what logs call it
    sha256: 9f86d081884c7d65...  # of the key; or, less well kept: `key: THE-KEY`
    tenant: finance              # default: the id
    priority: {min: 0, max: 10}  # or one number; lower runs first
    max_concurrent_requests: 8
    requests_per_minute: 600
    tokens_per_minute: 100000
    admin: false
    trusted: false               # only the engine's file: the facade's own key
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import msgspec

from access.keys import NAME, ApiKey, digest_of, is_writable
from access.limits import Limits

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_Priority = Annotated[int, msgspec.Meta(ge=-1000, le=1000)]


class KeysFileError(Exception):
    """The file can't be used; the message names it and the entry."""


class _PriorityRange(msgspec.Struct, forbid_unknown_fields=True):
    min: _Priority | None = None
    max: _Priority | None = None


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    key: str | None = None
    sha256: str | None = None
    tenant: str | None = None
    priority: _Priority | _PriorityRange | None = None
    max_concurrent_requests: _Count | None = None
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    admin: bool = False
    trusted: bool = False


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[_Entry]


def read_keys_file(path: Path) -> tuple[ApiKey, ...]:
    """Raises KeysFileError. No key of the file is ever in a message."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise KeysFileError(f"{path}: can't be read: {why}") from None
    try:
        document = msgspec.convert(_parse(text, path), _Document)
        keys = tuple(_key(entry) for entry in document.keys)
        _check_distinct(keys)
    except (msgspec.ValidationError, ValueError) as error:
        raise KeysFileError(f"{path}: {error}") from None
    return keys


def _parse(text: str, path: Path) -> object:
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from None
    import yaml  # slow to import, and most servers have no file

    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        # Not the error's own text: it quotes the file.
        mark = error.problem_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"is not YAML: {where}{error.problem}") from None
    except yaml.YAMLError:
        raise ValueError("is not YAML") from None


def _key(entry: _Entry) -> ApiKey:
    name = f"the key {entry.id!r}"
    if not NAME.fullmatch(entry.id):
        raise ValueError("an id has 1 to 128 letters, digits and ._:@-")
    tenant = entry.id if entry.tenant is None else entry.tenant
    if not NAME.fullmatch(tenant):
        raise ValueError(f"{name}: a tenant has 1 to 128 letters, digits and ._:@-")
    if (entry.key is None) == (entry.sha256 is None):
        raise ValueError(f"{name}: needs either `sha256` or `key`")
    lowest, highest = _priorities(entry.priority)
    if lowest is not None and highest is not None and lowest > highest:
        raise ValueError(f"{name}: priority: min is above max")
    return ApiKey(
        id=entry.id,
        digest=_digest(entry, name),
        tenant=tenant,
        min_priority=lowest,
        max_priority=highest,
        limits=Limits(
            max_concurrent_requests=entry.max_concurrent_requests,
            requests_per_minute=entry.requests_per_minute,
            tokens_per_minute=entry.tokens_per_minute,
        ),
        is_admin=entry.admin,
        is_trusted=entry.trusted,
    )


def _digest(entry: _Entry, name: str) -> bytes:
    if entry.key is not None:
        if not is_writable(entry.key):
            raise ValueError(f"{name}: a key is printable ASCII without spaces")
        return digest_of(entry.key)
    if entry.sha256 is None or not _SHA256.fullmatch(entry.sha256):
        raise ValueError(f"{name}: sha256 has 64 hexadecimal digits")
    return bytes.fromhex(entry.sha256)


def _priorities(given: int | _PriorityRange | None) -> tuple[int | None, int | None]:
    if isinstance(given, int):
        return given, given
    return (None, None) if given is None else (given.min, given.max)


def _check_distinct(keys: tuple[ApiKey, ...]) -> None:
    ids, digests = set[str](), set[bytes]()
    for key in keys:
        if key.id in ids:
            raise ValueError(f"two keys have the id {key.id!r}")
        if key.digest in digests:
            raise ValueError(f"the key {key.id!r} is the same as one before it")
        ids.add(key.id)
        digests.add(key.digest)
