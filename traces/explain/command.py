"""`firsttoken ttft`: explains one first token, or ranks the causes over many."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from traces.explain.explanation import as_json, explain
from traces.explain.ranking import Ranking, rank, rank_slowest, ranking_json, ranking_text
from traces.explain.waterfall import waterfall
from traces.request_reader import read_alike, read_named, read_since, read_slowest
from traces.setup import trace_directory

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,160}")  # an engine's is longer than the caller's
_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_UNIT_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DEFAULT_SLOWEST: Final = 20


class _CannotExplain(Exception):
    """A full sentence for the person at the command line."""


def ttft(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 where the store has no such request, 2 for wrong arguments."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.id and (options.slowest or options.since):
        parser.error("an id says which: --slowest and --since are for many")
    try:
        answer = _answer(options)
    except (_CannotExplain, OSError) as error:
        print(f"firsttoken ttft: {error}", file=sys.stderr)
        return 1
    try:
        print(answer, flush=True)
    except BrokenPipeError:  # its reader had enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _answer(options: argparse.Namespace) -> str:
    directory = _directory(options.trace_dir)
    if options.id:
        return _named(directory, options.id, as_program=options.json)
    ranking = _ranked(directory, options)
    if not ranking.num_requests:
        raise _CannotExplain(f"there are no first tokens of that time in {directory}")
    return _of_many(ranking, as_program=options.json)


def _ranked(directory: Path, options: argparse.Namespace) -> Ranking:
    if not options.since:
        return rank_slowest(read_slowest(directory, options.slowest or _DEFAULT_SLOWEST))
    since_unix_ns = time.time_ns() - round(options.since * 1e9)
    return rank(read_since(directory, since_unix_ns), options.slowest)


def _named(directory: Path, name: str, *, as_program: bool) -> str:
    views = read_named(directory, name)
    if not views:
        raise _CannotExplain(
            f"there is no request with trace or request id {name} in {directory}; spans are written"
            " about a second after they end, and a trace that was not sampled is not there"
        )
    if len(views) > 1:  # the turns of an agent
        return _of_many(rank(views), as_program=as_program)
    explanation = explain(views[0], read_alike(directory, views[0]))
    return json.dumps(as_json(explanation)) if as_program else waterfall(explanation)


def _of_many(ranking: Ranking, *, as_program: bool) -> str:
    return json.dumps(ranking_json(ranking)) if as_program else ranking_text(ranking)


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
    add("id", nargs="?", type=_id, help="a trace id, a traceparent, or an x-request-id")
    add(
        "--slowest",
        type=_count,
        metavar="N",
        help="rank the causes of the N slowest first tokens"
        f" (without id and --since: {_DEFAULT_SLOWEST})",
    )
    add("--since", type=_age, metavar="AGE", help="rank requests this young: 90s, 10m, 2h, 1d")
    add("--trace-dir", metavar="DIR", help="the local trace store")
    add("--json", action="store_true", help="one JSON object, for programs")
    return parser


def _id(text: str) -> str:
    if traceparent := _TRACEPARENT.fullmatch(text):
        return traceparent[1]
    if not _ID.fullmatch(text):
        raise argparse.ArgumentTypeError(
            "an id has letters, digits and ._- only; a trace id has 32 hexadecimal digits"
        )
    return text


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
