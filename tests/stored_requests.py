"""The one request of a trace, as the local store has it."""

from __future__ import annotations

from pathlib import Path

from traces.request_reader import read_named
from traces.request_view import RequestView


def read_request(directory: Path, trace_id: str) -> RequestView | None:
    """None: the store has nothing of it yet. Fails if the trace has several."""
    views = read_named(directory, trace_id)
    assert len(views) <= 1
    return views[0] if views else None
