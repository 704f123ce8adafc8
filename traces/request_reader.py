"""The requests of the local trace store, read for one question at a time.

one    a trace, or a request by its id      only its own spans are decoded, and its steps
since  all of the last minutes              files and requests that are older are left out
slow   the slowest of all                   first what tells the time to each first token; then
                                            all of those that were asked for
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from traces import names
from traces.request_view import RequestView, beginnings_of, join, text_of
from traces.stored_spans import read_spans

_MAX_ALIKE: Final = 32  # earlier requests that are looked at for one
_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}")
# Spans that tell neither the time to a first token nor what a request begins with.
_DETAILS: Final = (
    *(names.SPAN_STEP, names.SPAN_QUEUE, names.SPAN_PREFILL, names.SPAN_DECODE, names.SPAN_ADMIT),
    *(names.SPAN_GRAMMAR_COMPILE, names.SPAN_READ_BODY, names.SPAN_PARSE, names.SPAN_PLAN),
    *(names.SPAN_TOKENIZE, names.SPAN_FIRST_WRITE),
)


class Alike:
    """Finds requests that begin like another one and came before it."""

    def __init__(self, views: Iterable[RequestView]) -> None:
        """`views` by start."""
        self._views: dict[str, list[RequestView]] = {}  # by what they begin with
        self._starts: dict[str, list[int]] = {}
        for view in views:
            for beginning in beginnings_of(view):
                self._views.setdefault(beginning, []).append(view)
                self._starts.setdefault(beginning, []).append(_start(view))

    def before(self, view: RequestView) -> list[RequestView]:
        """At most `_MAX_ALIKE`: the longest common beginnings first, of equal ones the latest."""
        found: dict[int, RequestView] = {}
        for beginning in reversed(beginnings_of(view)):
            before = bisect_left(self._starts.get(beginning, []), _start(view))
            for other in reversed(self._views.get(beginning, [])[:before]):
                if len(found) == _MAX_ALIKE:
                    return list(found.values())
                found.setdefault(id(other), other)
        return list(found.values())


@dataclass(frozen=True, slots=True)
class SlowestRequests:
    views: list[RequestView]  # the slowest first
    others: list[RequestView]  # they and those that begin alike, by start
    all_seconds: list[float]  # to each first token of the store


def read_named(directory: Path, name: str) -> list[RequestView]:
    """The requests of a trace, or those with a request id, as the caller or the engine knows it;
    by start."""
    if _TRACE_ID.fullmatch(name) and (views := join(read_spans(directory, of_traces=[name]))):
        return [view for view in views if view.trace_id == name]
    named = [
        span
        for span in read_spans(directory, mentioning=[name], without=[names.SPAN_STEP])
        if name in (text_of(span, names.REQUEST_ID), text_of(span, names.GEN_AI_RESPONSE_ID))
    ]
    if not named:
        return []
    span_ids = {span["span_id"] for span in named}
    views = join(read_spans(directory, of_traces={span["trace_id"] for span in named}))
    return [v for v in views if not span_ids.isdisjoint(span["span_id"] for span in v.spans)]


def read_alike(directory: Path, view: RequestView) -> list[RequestView]:
    """The latest that began before it and begin like it, with equal tokens or an equal message."""
    beginnings = beginnings_of(view)
    if not beginnings:
        return []
    spans = read_spans(
        directory, mentioning={beginnings[0], beginnings[-1]}, without=[names.SPAN_STEP]
    )
    alike = {
        span["trace_id"]: span["start_unix_ns"]
        for span in spans
        if span["start_unix_ns"] < _start(view)
    }
    latest = sorted(alike, key=lambda trace_id: -alike[trace_id])[:_MAX_ALIKE]
    views = join(read_spans(directory, of_traces=latest, without=[names.SPAN_STEP]))
    return [other for other in views if _start(other) < _start(view)]


def read_since(directory: Path, since_unix_ns: int) -> list[RequestView]:
    """All that began then or later, by start."""
    views = join(read_spans(directory, since_unix_ns=since_unix_ns))
    return [view for view in views if _start(view) >= since_unix_ns]


def read_slowest(directory: Path, count: int) -> SlowestRequests:
    """At most `count`; those without a first token are none."""
    known = join(read_spans(directory, without=_DETAILS))
    had = [(seconds, view) for view in known if (seconds := view.ttft_seconds) is not None]
    had.sort(key=lambda one: -one[0])
    slowest = [view for _, view in had[:count]]
    alike = Alike(known)
    wanted = {view.trace_id for view in slowest}
    wanted |= {other.trace_id for view in slowest for other in alike.before(view)}
    whole = {_key(view): view for view in join(read_spans(directory, of_traces=wanted))}
    return SlowestRequests(
        views=[whole[_key(view)] for view in slowest if _key(view) in whole],
        others=list(whole.values()),
        all_seconds=[seconds for seconds, _ in had],
    )


def _start(view: RequestView) -> int:
    return view.root["start_unix_ns"]


def _key(view: RequestView) -> tuple[str, str]:
    return view.trace_id, view.root["span_id"]
