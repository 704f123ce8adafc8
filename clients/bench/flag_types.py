"""What the values of flags must look like; argparse prints what these raise."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from clients.bench.compare import Load, parse_loads
from clients.bench.targets import GRPC_SCHEME

Complaint = argparse.ArgumentTypeError


def positive(text: str) -> int:
    return _whole_number(text, at_least=1)


def not_negative(text: str) -> int:
    return _whole_number(text, at_least=0)


def _whole_number(text: str, *, at_least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = at_least - 1
    if number < at_least:
        raise Complaint(f"{text!r} is no whole number from {at_least} on")
    return number


def positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise Complaint(f"{text!r} is no positive number")
    return number


def api_key(text: str) -> str:
    """The complaint does not show it."""
    if not text or not all("!" <= character <= "~" for character in text):
        raise Complaint("an API key is printable ASCII without spaces")
    return text


def http_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        is_url = False
    if not is_url:
        raise Complaint(f"{text!r} is no http:// or https:// address")
    return text


def grpc_address(text: str) -> str:
    """HOST:PORT becomes an address as `open_target` takes it."""
    host, _, port = text.removeprefix(GRPC_SCHEME).rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise Complaint(f"{text!r} is no HOST:PORT")
    return f"{GRPC_SCHEME}{host}:{port}"


def any_address(text: str) -> str:
    return grpc_address(text) if text.startswith(GRPC_SCHEME) else http_url(text)


def json_object(text: str) -> dict[str, object]:
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise Complaint(f"{text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise Complaint(f"{text!r} is no JSON object")
    return value


def loads(text: str) -> Sequence[Load]:
    try:
        return parse_loads(text)
    except ValueError as error:
        raise Complaint(str(error)) from error


def writable_path(text: str) -> Path:
    """Told before a run of minutes is lost to a typing error."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise Complaint(f"{text!r} cannot be written: no such folder, or a folder itself")
    return path
