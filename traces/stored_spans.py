"""The spans of the local trace store, as they lie there: one JSON object a line.

    {"trace_id", "span_id", "parent_span_id", "name", "kind", "start_unix_ns", "end_unix_ns",
     "attributes", "events": [{"name", "unix_ns", "attributes"}],
     "links": [{"trace_id", "span_id"}], "status": {"code", "message"},
     "service", "pid"}

Reading needs no more than this module: no OpenTelemetry.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, TypedDict

_TRACE_ID: Final = slice(len('{"trace_id": "'), len('{"trace_id": "') + 32)  # of each line

AttributeValue = str | bool | int | float | list[str] | list[bool] | list[int] | list[float]


class StoredEvent(TypedDict):
    name: str
    unix_ns: int
    attributes: dict[str, AttributeValue]


class StoredLink(TypedDict):
    trace_id: str
    span_id: str


class StoredStatus(TypedDict):
    code: str  # UNSET, OK, ERROR
    message: str


class StoredSpan(TypedDict):
    trace_id: str
    span_id: str
    parent_span_id: str  # empty: a root
    name: str
    kind: str  # SERVER, CLIENT, INTERNAL, ...
    start_unix_ns: int
    end_unix_ns: int
    attributes: dict[str, AttributeValue]
    events: list[StoredEvent]
    links: list[StoredLink]
    status: StoredStatus
    service: str
    pid: int


def read_spans(
    directory: Path,
    trace_id: str | None = None,
    *,
    mentioning: Collection[str] = (),
    of_traces: Collection[str] = (),
    since_unix_ns: int = 0,
) -> Iterator[StoredSpan]:
    """All spans of the directory, or those of one trace; a line cut off by a crash is skipped.

    `mentioning`: with one of these texts anywhere in them; `of_traces`: of these traces only. Files
    that were last written before `since_unix_ns` are not read: what they hold had ended by then.
    Only what is wanted is decoded.
    """
    wanted = {trace_id} if trace_id is not None else set(of_traces)
    for path in sorted(directory.glob("*.jsonl")):
        for line in _lines(path, since_unix_ns):
            if wanted and line[_TRACE_ID] not in wanted:
                continue
            if mentioning and not any(text in line for text in mentioning):
                continue
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


def _lines(path: Path, since_unix_ns: int) -> Iterator[str]:
    """None of a file that was removed meanwhile for its age."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_mtime_ns >= since_unix_ns:
            with open(path, encoding="utf-8", errors="replace") as file:
                yield from file
