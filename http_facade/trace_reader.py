"""What the /traces page shows of the local store, read on a thread of its own and within bounds.

    facade  |   not read      |<----- read ------->|     as far back in time in the file of each
    engine  |       not read  |<------ read ------>|     process, until the bound is reached
    older   |  not read  |

A request that began before that may have parts that were not read: the list leaves it out. One
read at a time: whoever asks meanwhile waits.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Final, TypeVar

from traces import names
from traces.explain.causes import kind_of
from traces.explain.explanation import as_json, explain
from traces.explain.waterfall import rows_of
from traces.request_view import RequestView, join, number_of, text_of
from traces.stored_spans import LINE_START, StoredSpan

LIST_BYTES: Final = 32 * 2**20  # of the store, for a list: thousands of requests
TRACE_BYTES: Final = 512 * 2**20  # for one trace: most lines are only searched for its id
MAX_SPANS: Final = 500  # of one trace
_CHUNK_BYTES: Final = 2**20  # of a file, read at a time
_LINE_START: Final = LINE_START.encode()
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

    async def request(self, trace_id: str, span_id: str = "") -> Json | None:
        """`span_id`: which of a trace's requests, by its first span; empty: the first one. None:
        the store has nothing of it, or nothing as new as is read."""
        return await self._read(lambda: _request(self._directory, trace_id, span_id))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _read(self, read: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, read)


# ---------------------------------------------------------------- on the thread


def _requests(directory: Path, wanted: TraceFilter) -> Json:
    store = _RecentSpans(directory, LIST_BYTES)
    views = join(store.spans())
    views = [view for view in views if view.root["start_unix_ns"] >= store.since_ns]
    turns = Counter(view.trace_id for view in views)
    rows: list[Json] = []
    for view in reversed(views):
        row = _row(view, is_turn=turns[view.trace_id] > 1)
        if wanted.takes(row):
            rows.append(row)
            if len(rows) == wanted.limit:
                break
    return {"requests": rows, "num_read": len(views), "is_all": not store.is_cut}


def _request(directory: Path, trace_id: str, span_id: str) -> Json | None:
    views = join(_RecentSpans(directory, TRACE_BYTES, trace_id).spans(), trace_ids=[trace_id])
    view = next((v for v in views if span_id in ("", v.root["span_id"])), None)
    if view is None:
        return None
    explanation = explain(view, join(_RecentSpans(directory, LIST_BYTES).spans()))
    origin_ns = view.root["start_unix_ns"]
    return {
        "request": _row(view, is_turn=len(views) > 1),
        "turns": [_row(one, is_turn=True) for one in views] if len(views) > 1 else [],
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


def _row(view: RequestView, *, is_turn: bool) -> Json:
    """One line of the list. `is_turn`: its trace has other requests, too."""
    root = view.root
    call = view.call.server if view.call is not None else root
    http_status = number_of(root, names.HTTP_RESPONSE_STATUS_CODE)
    status = root["status"]["message"] or (str(http_status) if http_status else "")
    top = explain(view).top
    ttft = view.ttft_seconds
    return {
        "trace_id": view.trace_id,
        "span_id": root["span_id"] if is_turn else "",  # what tells it from the others
        "request_id": view.request_id,
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
    """What the processes wrote last, as far back in all their files."""

    def __init__(self, directory: Path, max_bytes: int, mentioning: str = "") -> None:
        self._directory = directory
        self._left = max_bytes
        self._mentioning = mentioning.encode()
        self.since_ns = 0  # known once all were read: from here on nothing is missing

    @property
    def is_cut(self) -> bool:
        return self.since_ns > 0

    def spans(self) -> Iterator[StoredSpan]:
        unread = [(-tail.reached_ns, number, tail) for number, tail in enumerate(self._tails())]
        heapify(unread)
        while unread and self._left > 0:
            _, number, tail = heappop(unread)
            start = tail.start
            for line in tail.read_back(min(_CHUNK_BYTES, self._left)):
                if line.startswith(_LINE_START) and self._mentioning in line:
                    with suppress(json.JSONDecodeError, UnicodeDecodeError):
                        span: StoredSpan = json.loads(line)
                        yield span
            self._left -= start - tail.start
            if tail.start:
                heappush(unread, (-tail.reached_ns, number, tail))
        self.since_ns = max((tail.reached_ns for _, _, tail in unread), default=0)

    def _tails(self) -> Iterator[_Tail]:
        for path in self._directory.glob("*.jsonl"):
            with suppress(FileNotFoundError):  # it was removed meanwhile for its age
                stat = path.stat()
                yield _Tail(path, stat.st_size, stat.st_mtime_ns)


@dataclass(slots=True)
class _Tail:
    """A file, read from its end on."""

    path: Path
    start: int  # bytes before what was read
    reached_ns: int  # all that ended later was read; at first when it was written last

    def read_back(self, num_bytes: int) -> list[bytes]:
        """Whole lines of the `num_bytes` before what was read, or of some more: one at least. Of a
        line that was cut off by a crash nothing comes of it."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            while self.start:
                begin = max(self.start - num_bytes, 0)
                file.seek(begin)
                data = file.read(self.start - begin)
                first = data.find(b"\n") + 1 if begin else 0  # the rest of one that began before
                if begin and not 0 < first < len(data):
                    num_bytes *= 2
                    continue
                self.start = begin + first
                lines = data[first:].splitlines(keepends=True)
                self._reach(lines)
                return lines
        self.start = 0
        return []

    def _reach(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            with suppress(json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
                self.reached_ns = int(json.loads(line)["end_unix_ns"])
                return
