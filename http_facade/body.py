"""A request body: read, and from bytes to plain Python data.

The JSON is decoded by msgspec, which refuses NaN, Infinity, numbers out of range, invalid UTF-8
and lone surrogates. Its complaint names a byte, not a field, and calls a lone surrogate a truncated
body; so a body that fails is read once more, leniently, only to find the field to name.
Of duplicate keys the last one counts.

What a body costs lies in its values more than in its bytes: 32 MB of `[1],[1],` would be gigabytes
of lists, and seconds in which no stream gets a token. So its values are counted, roughly, by their
punctuation, before it is decoded. What all bodies may take together: `body_memory.py`.
"""

from __future__ import annotations

import asyncio
import json
import math

import msgspec
from aiohttp import hdrs, web
from aiohttp.http_exceptions import PayloadEncodingError

from http_facade.body_memory import BODY_MEMORY, BodyShare
from http_facade.errors import ApiError, invalid, unsupported_encoding
from http_facade.state import STATE

_READ_SECONDS = 120.0  # for a body to arrive
_MAX_PATH_CHARS = 200
_MAX_INTEGER_DIGITS = 300  # far beyond any field of ours
_MAX_EXPLAINED_BYTES = 2**20  # of a longer body no field is looked for
# a quarter of a million lists, a million texts, or four million numbers
_MAX_WEIGHT = 4_000_000
_WEIGHTS = ((b"[", 16), (b"{", 16), (b'"', 2), (b",", 1))  # by what each comes to, decoded
_ENCODINGS = ("", "identity", "gzip", "deflate")


async def read_body(request: web.Request, max_body_bytes: int) -> bytearray:
    """Of JSON, uncompressed, not decoded yet. Raises ApiError."""
    says_type = bool(request.headers.get(hdrs.CONTENT_TYPE))
    # Without a type any page may send a body from a browser, which asks beforehand for JSON only.
    is_from_page = hdrs.ORIGIN in request.headers
    if (says_type or is_from_page) and request.content_type != "application/json":
        raise ApiError(
            415,
            "the request body must be application/json, not "
            f"{request.content_type} (with curl: -H 'Content-Type: application/json')",
            code="unsupported_media_type",
        )
    encodings = request.headers.getall(hdrs.CONTENT_ENCODING, [""])
    if len(encodings) > 1 or encodings[0].lower() not in _ENCODINGS:
        raise unsupported_encoding()
    says_bytes = request.content_length or 0
    if says_bytes > max_body_bytes:
        raise _too_large(f"has {says_bytes} bytes; at most {max_body_bytes} are taken")
    share = request[STATE].body_share = BodyShare(request.app[BODY_MEMORY])
    share.hold(says_bytes)
    return await _read(request, max_body_bytes, share)


def _too_large(what: str) -> ApiError:
    return ApiError(413, f"the request body {what}", code="request_too_large")


async def _read(request: web.Request, max_body_bytes: int, share: BodyShare) -> bytearray:
    """`share` grows with a body that doesn't say its length, or is compressed."""
    body = bytearray()
    try:
        async with asyncio.timeout(_READ_SECONDS):
            async for piece in request.content.iter_any():
                if len(body) + len(piece) > max_body_bytes:
                    raise _too_large(f"is too large: at most {max_body_bytes} bytes are taken")
                share.hold(len(body) + len(piece))
                body += piece
    except TimeoutError:
        raise ApiError(
            408,
            f"the request body did not arrive within {_READ_SECONDS:g} seconds",
            code="request_timeout",
        ) from None
    except (web.RequestPayloadError, PayloadEncodingError):
        raise invalid(
            None, "the body is not encoded as its headers say", code="bad_encoding"
        ) from None
    return body


def decode_json(data: bytes | bytearray) -> object:
    """Raises ApiError."""
    if _is_too_heavy(data):
        raise ApiError(
            413,
            "the JSON of the body has too many values: at most a quarter of a million arrays and"
            " objects, a million texts or four million numbers are taken",
            code="request_too_large",
        )
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise invalid(
            None, "the JSON of the body is nested too deeply", code="invalid_json"
        ) from None
    except msgspec.DecodeError as error:
        raise _explain(data, error) from None


def _is_too_heavy(data: bytes | bytearray) -> bool:
    """Exact where the rough count is too much: punctuation within texts is none."""
    if _weight(data) <= _MAX_WEIGHT:
        return False
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    if 2 * unescaped.count(b'"') > _MAX_WEIGHT:  # too many texts, also to take them out one by one
        return True
    return _weight(b'""'.join(unescaped.split(b'"')[::2])) > _MAX_WEIGHT


def _weight(data: bytes | bytearray) -> int:
    return sum(weight * data.count(mark) for mark, weight in _WEIGHTS)


def _explain(data: bytes | bytearray, error: msgspec.DecodeError) -> ApiError:
    if not data.strip():
        return invalid(None, "the request body is empty", code="invalid_json")
    fault = _find_fault(data) if len(data) <= _MAX_EXPLAINED_BYTES else None
    if fault is not None:
        return fault
    text = str(error).split(" - at ")[0]
    return invalid(None, f"the body is not valid JSON: {text}", code="invalid_json")


class _BadNumber:
    """Stands for a number that strict JSON can't hold."""


def _finite(text: str) -> object:
    return 0.0 if math.isfinite(float(text)) else _BadNumber()


def _small(text: str) -> object:
    return 0 if len(text) <= _MAX_INTEGER_DIGITS else _BadNumber()


def _find_fault(data: bytes | bytearray) -> ApiError | None:
    """What lenient JSON takes and strict JSON doesn't, by its field."""
    try:
        document: object = json.loads(
            data, parse_float=_finite, parse_int=_small, parse_constant=lambda _: _BadNumber()
        )
    except (ValueError, RecursionError):
        return None
    pending: list[tuple[str, object]] = [("", document)]
    while pending:
        path, value = pending.pop()
        shown = path[:_MAX_PATH_CHARS] or None
        if isinstance(value, _BadNumber):
            return invalid(shown, "the number is out of range or not finite")
        texts = value if isinstance(value, dict) else (value,)  # of an object its names
        if any(isinstance(text, str) and _has_lone_surrogate(text) for text in texts):
            where = "a name in it" if isinstance(value, dict) else "the text"
            return invalid(
                shown, f"{where} holds a lone surrogate, which is no character", code="invalid_json"
            )
        if isinstance(value, dict):
            pending.extend((f"{path}.{key}" if path else key, item) for key, item in value.items())
        elif isinstance(value, list):
            pending.extend((f"{path}[{index}]", item) for index, item in enumerate(value))
    return None


def _has_lone_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
