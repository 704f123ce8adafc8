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
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, TypedDict

# Of each line, whose fields are in this order.
LINE_START: Final = '{"trace_id": "'
_TRACE_ID: Final = slice(len(LINE_START), len(LINE_START) + 32)
_NAME: Final = re.compile(r'"name": "((?:[^"\\]|\\.)*)"')
_LINKS: Final = '"links": ['
_LINKED: Final = re.compile(r'"trace_id": "([0-9a-f]{32})"')

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
    of_traces: Collection[str] | None = None,
    without: Collection[str] = (),
    since_unix_ns: int = 0,
) -> Iterator[StoredSpan]:
    """All spans of the directory, or those of one trace. A line that was cut off by a crash is
    skipped, and what others have put there.

    `mentioning`: with one of these texts anywhere in them; `of_traces`: of these traces, or linked
    to them, as steps are (None: of all); `without`: names of spans that are not wanted. Files that
    were last written before `since_unix_ns` are not read: what they hold had ended by then. Only
    what is wanted is decoded.
    """
    wanted, unwanted = None if of_traces is None else set(of_traces), set(without)
    for path in sorted(directory.glob("*.jsonl")):
        for line in _lines(path, since_unix_ns):
            if not line.startswith(LINE_START):
                continue
            if trace_id is not None and line[_TRACE_ID] != trace_id:
                continue
            if not (wanted is None or line[_TRACE_ID] in wanted or _is_linked(line, wanted)):
                continue
            if unwanted and (name := _NAME.search(line)) and name[1] in unwanted:
                continue
            if mentioning and not any(text in line for text in mentioning):
                continue
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


def _is_linked(line: str, trace_ids: set[str]) -> bool:
    links = line.rfind(_LINKS)
    return links >= 0 and not trace_ids.isdisjoint(_LINKED.findall(line, links))


def _lines(path: Path, since_unix_ns: int) -> Iterator[str]:
    """None of a file that was removed meanwhile for its age."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_mtime_ns >= since_unix_ns:
            with open(path, encoding="utf-8", errors="replace") as file:
                yield from file
