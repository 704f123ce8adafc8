"""`firsttoken ttft`: explains one first token, or ranks the causes over many."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from traces.explain.explanation import as_json, explain
from traces.explain.ranking import rank, ranking_json, ranking_text
from traces.explain.waterfall import waterfall
from traces.request_view import read_alike, read_request, read_requests
from traces.setup import trace_directory

_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}")
_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_UNIT_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DEFAULT_SLOWEST: Final = 20


class _CannotExplain(Exception):
    """A full sentence for the person at the command line."""


def ttft(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 where the store has no such trace, 2 for wrong arguments."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.trace_id and (options.slowest or options.since):
        parser.error("a trace id says which: --slowest and --since are for many")
    try:
        print(_answer(options))
    except _CannotExplain as error:
        print(f"firsttoken ttft: {error}", file=sys.stderr)
        return 1
    return 0


def _answer(options: argparse.Namespace) -> str:
    directory = _directory(options.trace_dir)
    if options.trace_id:
        return _one(directory, options.trace_id, as_program=options.json)
    since_unix_ns = time.time_ns() - round(options.since * 1e9) if options.since else 0
    views = read_requests(directory, since_unix_ns=since_unix_ns)
    if not views:
        raise _CannotExplain(f"there are no requests of that time in {directory}")
    slowest = options.slowest or (None if options.since else _DEFAULT_SLOWEST)
    ranking = rank(views, slowest)
    return json.dumps(ranking_json(ranking)) if options.json else ranking_text(ranking)


def _one(directory: Path, trace_id: str, *, as_program: bool) -> str:
    view = read_request(directory, trace_id)
    if view is None:
        raise _CannotExplain(
            f"there is no request with trace id {trace_id} in {directory}; spans are written about"
            " a second after they end, and a trace that was not sampled is not there"
        )
    explanation = explain(view, read_alike(directory, view))
    return json.dumps(as_json(explanation)) if as_program else waterfall(explanation)


def _directory(given: str | None) -> Path:
    name = trace_directory(given)
    if name is None:
        raise _CannotExplain(
            "there is no trace store: FIRSTTOKEN_TRACE_DIR, or the flag, says none"
        )
    directory = Path(name)
    if not directory.is_dir():
        raise _CannotExplain(f"there is no trace store at {directory}; see --trace-dir")
    return directory


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="firsttoken ttft",
        description="Says where the time to a first token went: of one trace, or ranked over many.",
    )
    add = parser.add_argument
    add("trace_id", nargs="?", type=_trace_id, help="32 hexadecimal digits, or a traceparent")
    add(
        "--slowest",
        type=_count,
        metavar="N",
        help="rank the causes of the N slowest first tokens"
        f" (without trace id and --since: {_DEFAULT_SLOWEST})",
    )
    add("--since", type=_age, metavar="AGE", help="rank requests this young: 90s, 10m, 2h, 1d")
    add("--trace-dir", metavar="DIR", help="the local trace store")
    add("--json", action="store_true", help="one JSON object, for programs")
    return parser


def _trace_id(text: str) -> str:
    parts = text.lower().split("-")  # a traceparent: 00-<trace id>-<span id>-<flags>
    trace_id = parts[1] if len(parts) == 4 else parts[0]
    if not _TRACE_ID.fullmatch(trace_id):
        raise argparse.ArgumentTypeError("a trace id has 32 hexadecimal digits")
    return trace_id


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of at least 1 expected, not {text!r}")
    return int(text)


def _age(text: str) -> float:
    """Seconds."""
    match = _AGE.fullmatch(text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(
            f"an age such as 90s, 10m, 2h or 1d expected, not {text!r}"
        )
    return float(match[1]) * _UNIT_SECONDS[match[2]]
