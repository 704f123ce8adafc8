"""What the /traces page shows of the local store, read on a thread of its own and within bounds.

    newest file |<------------- read ------------->|     files by their last change; of the one
    next        |          <-- read, from its end->|     that the bound cuts, its end
    older       |                                  |     not read

One read at a time: whoever asks meanwhile waits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from traces import names
from traces.explain.causes import kind_of
from traces.explain.explanation import as_json, explain
from traces.explain.waterfall import rows_of
from traces.request_view import RequestView, join, number_of, text_of
from traces.stored_spans import StoredSpan

LIST_BYTES: Final = 32 * 2**20  # of the store, for a list: thousands of requests
TRACE_BYTES: Final = 512 * 2**20  # for one trace: most lines are only searched for its id
MAX_SPANS: Final = 500  # of one trace
_ERROR_STATUS: Final = 400  # of HTTP, and above

Json = dict[str, object]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TraceFilter:
    text: str = ""  # in ids, model, route, cause or status; case is ignored
    min_ttft_ms: float = 0.0  # 0: those without a first token, too
    errors_only: bool = False
    limit: int = 100  # requests, the newest ones

    def takes(self, row: Json) -> bool:
        if self.errors_only and not row["is_error"]:
            return False
        ttft_ms = row["ttft_ms"]
        if self.min_ttft_ms and not (isinstance(ttft_ms, float) and ttft_ms >= self.min_ttft_ms):
            return False
        searched = ("trace_id", "request_id", "model", "name", "cause", "status")
        return not self.text or any(self.text in str(row[key]).lower() for key in searched)


class TraceReader:
    """`close` when no more is asked."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trace-reader")

    async def requests(self, wanted: TraceFilter) -> Json:
        return await self._read(lambda: _requests(self._directory, wanted))

    async def request(self, trace_id: str) -> Json | None:
        """None: the store has nothing of it, or nothing as new as is read."""
        return await self._read(lambda: _request(self._directory, trace_id))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _read(self, read: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, read)


# ---------------------------------------------------------------- on the thread


def _requests(directory: Path, wanted: TraceFilter) -> Json:
    store = _RecentSpans(directory, LIST_BYTES)
    views = join(store.spans())
    rows: list[Json] = []
    for view in reversed(views):
        row = _row(view)
        if wanted.takes(row):
            rows.append(row)
            if len(rows) == wanted.limit:
                break
    return {"requests": rows, "num_read": len(views), "is_all": not store.is_cut}


def _request(directory: Path, trace_id: str) -> Json | None:
    views = join(_RecentSpans(directory, TRACE_BYTES, trace_id).spans(), trace_ids=[trace_id])
    if not views:
        return None
    view = views[0]
    explanation = explain(view, join(_RecentSpans(directory, LIST_BYTES).spans()))
    origin_ns = view.root["start_unix_ns"]
    return {
        "request": _row(view),
        "explanation": as_json(explanation),
        "prefix_text": explanation.prefix_text(),
        "rows": [
            {
                "name": row.name,
                "cause": kind_of(row.name).name,
                "start_ms": row.start_ns * 1e-6,
                "end_ms": row.end_ns * 1e-6,
                "ms": row.seconds * 1e3,
                "detail": row.detail,
            }
            for row in rows_of(explanation.parts)
        ],
        "spans": [_span(span, origin_ns) for span in view.spans[:MAX_SPANS]],
        "spans_left_out": max(len(view.spans) - MAX_SPANS, 0),
    }


def _row(view: RequestView) -> Json:
    """One line of the list."""
    root = view.root
    call = view.call.server if view.call is not None else root
    http_status = number_of(root, names.HTTP_RESPONSE_STATUS_CODE)
    status = root["status"]["message"] or (str(http_status) if http_status else "")
    top = explain(view).top
    ttft = view.ttft_seconds
    return {
        "trace_id": view.trace_id,
        "request_id": text_of(root, names.REQUEST_ID) or text_of(call, names.REQUEST_ID),
        "started_unix_ms": root["start_unix_ns"] // 1_000_000,
        "name": root["name"],
        "model": text_of(root, names.GEN_AI_REQUEST_MODEL)
        or text_of(call, names.GEN_AI_REQUEST_MODEL),
        "ttft_ms": None if ttft is None else ttft * 1e3,
        "total_ms": (root["end_unix_ns"] - root["start_unix_ns"]) * 1e-6,
        "prompt_tokens": number_of(call, names.PROMPT_TOKENS),
        "cached_tokens": number_of(call, names.CACHED_TOKENS),
        "output_tokens": number_of(call, names.GEN_AI_USAGE_OUTPUT_TOKENS),
        "cause": "" if top is None else top.kind.name,
        "status": status,
        "is_error": root["status"]["code"] == "ERROR" or http_status >= _ERROR_STATUS,
    }


def _span(span: StoredSpan, origin_ns: int) -> Json:
    return {
        "name": span["name"],
        "service": span["service"],
        "kind": span["kind"],
        "start_ms": (span["start_unix_ns"] - origin_ns) * 1e-6,
        "end_ms": (span["end_unix_ns"] - origin_ns) * 1e-6,
        "status": span["status"]["message"] if span["status"]["code"] == "ERROR" else "",
    }


class _RecentSpans:
    def __init__(self, directory: Path, max_bytes: int, mentioning: str = "") -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._mentioning = mentioning.encode()
        self.is_cut = False  # known once all were read

    def spans(self) -> Iterator[StoredSpan]:
        """A line cut off by a crash is skipped."""
        left = self._max_bytes
        for path, size in self._files():
            if left <= 0:
                self.is_cut = True
                return
            for line in self._lines(path, max(size - left, 0)):
                with suppress(json.JSONDecodeError, UnicodeDecodeError):
                    span: StoredSpan = json.loads(line)
                    yield span
            left -= size
        self.is_cut = self.is_cut or left < 0

    def _files(self) -> list[tuple[Path, int]]:
        """The newest first, with their bytes."""
        found = []
        for path in self._directory.glob("*.jsonl"):
            with suppress(FileNotFoundError):  # it was removed meanwhile for its age
                stat = path.stat()
                found.append((stat.st_mtime_ns, path, stat.st_size))
        return [(path, size) for _, path, size in sorted(found, reverse=True)]

    def _lines(self, path: Path, start: int) -> Iterator[bytes]:
        with suppress(FileNotFoundError), path.open("rb") as file:
            if start:
                file.seek(start - 1)
                file.readline()  # the rest of one that began before
            for line in file:
                if self._mentioning in line:
                    yield line
