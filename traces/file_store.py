"""The local trace store: one directory, one JSON-lines file per process, no server.

Each line is one finished span, as `stored_spans` reads it.

A file that grew past its limit is renamed with a suffix and a new one begun; files of the
directory older than the age limit are removed, the oldest first when there are too many; files of
others are left alone. Whoever removes files may do so at any time: a process whose file is gone
begins it again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import format_span_id, format_trace_id

from traces.stored_spans import (
    LINE_START,
    AttributeValue,
    StoredEvent,
    StoredLink,
    StoredSpan,
    StoredStatus,
)


@dataclass(frozen=True, slots=True)
class StoreLimits:
    file_bytes: int = 64 * 1024 * 1024
    max_files: int = 32  # in the directory, all processes together
    max_age_seconds: float = 7 * 24 * 3600.0


class FileSpanExporter(SpanExporter):
    """Appends spans to `<directory>/<service>-<pid>.jsonl`.

    Used by one export thread. A full disk or a vanished directory loses spans, never a request:
    such an export reports FAILURE and the next one tries again.
    """

    def __init__(self, directory: Path, service: str, limits: StoreLimits = StoreLimits()) -> None:
        self._directory = directory
        self._service = service
        self._limits = limits
        self._path = directory / f"{service}-{os.getpid()}.jsonl"
        self._file: FileIO | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = b"".join(
            json.dumps(_stored(span, self._service), ensure_ascii=False).encode() + b"\n"
            for span in spans
        )
        try:
            self._append(lines)
        except OSError:
            self._close()
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True  # every export is written through

    def _append(self, lines: bytes) -> None:
        file = self._opened()
        left = memoryview(lines)
        while left:
            left = left[file.write(left) :]
        if file.tell() >= self._limits.file_bytes:
            self._rotate()

    def _opened(self) -> FileIO:
        """A file that is in the directory, and whose last line has ended."""
        if self._file is not None and not _is_at(self._path, self._file):
            self._close()
        if self._file is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(self._path, "ab+")
            if size := self._file.seek(0, os.SEEK_END):
                self._file.seek(size - 1)
                if self._file.read(1) != b"\n":  # a write was cut off, by a full disk or a crash
                    self._file.write(b"\n")
            _remove_old_files(self._directory, self._limits, keep=self._path)
        return self._file

    def _rotate(self) -> None:
        """The new name is one that no process with this one's pid, here or elsewhere, has given."""
        self._close()
        self._path.rename(self._path.with_suffix(f".{time.time_ns()}.jsonl"))

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _stored(span: ReadableSpan, service: str) -> StoredSpan:
    context = span.get_span_context()
    if context is None or span.start_time is None or span.end_time is None:
        raise ValueError("only finished spans are exported")
    return StoredSpan(
        trace_id=format_trace_id(context.trace_id),
        span_id=format_span_id(context.span_id),
        parent_span_id=format_span_id(span.parent.span_id) if span.parent else "",
        name=span.name,
        kind=span.kind.name,
        start_unix_ns=span.start_time,
        end_unix_ns=span.end_time,
        attributes=_plain(span.attributes),
        events=[
            StoredEvent(
                name=event.name,
                unix_ns=event.timestamp,
                attributes=_plain(event.attributes),
            )
            for event in span.events
        ],
        links=[
            StoredLink(
                trace_id=format_trace_id(link.context.trace_id),
                span_id=format_span_id(link.context.span_id),
            )
            for link in span.links
        ],
        status=StoredStatus(
            code=span.status.status_code.name, message=span.status.description or ""
        ),
        service=service,
        pid=os.getpid(),
    )


def _plain(attributes: object) -> dict[str, AttributeValue]:
    if not attributes:
        return {}
    items = dict(attributes)  # type: ignore[call-overload]
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in items.items()
    }


def _is_at(path: Path, file: FileIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove_old_files(directory: Path, limits: StoreLimits, keep: Path) -> None:
    """Applies age and count limits; another process may remove the same files meanwhile."""
    ages: list[tuple[float, Path]] = []
    for path in directory.glob("*.jsonl"):
        try:
            if path == keep or not (path.is_file() and _holds_spans(path)):
                continue
            ages.append((time.time() - path.stat().st_mtime, path))
        except OSError:  # gone meanwhile, or not for us to read
            continue
    ages.sort(key=lambda entry: entry[0])  # youngest first
    for rank, (age, path) in enumerate(ages):
        if age > limits.max_age_seconds or rank >= limits.max_files - 1:
            path.unlink(missing_ok=True)


def _holds_spans(path: Path) -> bool:
    """A directory that is not ours alone may hold JSON lines of others."""
    start = LINE_START.encode()
    with path.open("rb") as file:
        return file.read(len(start)) == start
