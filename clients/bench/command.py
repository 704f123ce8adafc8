"""`firsttoken bench`: from arguments to printed figures and an exit code."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path

import msgspec

from clients.bench import flags, plans
from clients.bench.compare import compare
from clients.bench.comparison import Pair, comparison_text, comparisons
from clients.bench.progress import Progress
from clients.bench.report import Report
from clients.bench.run import run
from clients.bench.sweep import sweep, sweep_text
from clients.bench.tables import report_text
from clients.bench.target import TargetError
from clients.bench.targets import open_target

_SOME_FAILED = 1
_NOT_MEASURABLE = 3
_INTERRUPTED = 130


def bench(arguments: Sequence[str]) -> int:
    """The exit code; `firsttoken bench --help` says what each means."""
    commands = {"compare": _compare, "sweep": _sweep}
    command, rest = (
        (commands[arguments[0]], arguments[1:])
        if arguments and arguments[0] in commands
        else (_bench, arguments)
    )
    try:
        return command(rest)
    except TargetError as error:
        print(f"firsttoken bench: {error}", file=sys.stderr)
        return _NOT_MEASURABLE
    except KeyboardInterrupt:  # a second one
        return _INTERRUPTED


def _bench(arguments: Sequence[str]) -> int:
    parser = flags.bench_parser()
    given = parser.parse_args(arguments)
    runs = plans.bench_plans(parser, given)
    options = plans.server_options(parser, given)
    reports: list[Report] = []

    async def measure() -> None:
        async with open_target(given.address, options) as target:
            for plan in runs:
                await run(plan, target, Progress(given.quiet), reports)

    is_complete = _until_done_or_interrupted(measure())
    for report in reports:
        print(report_text(report))
    _write_json(given.json, {"is_complete": is_complete, "reports": reports})
    return _exit_code(reports, is_complete)


def _compare(arguments: Sequence[str]) -> int:
    parser = flags.compare_parser()
    given = parser.parse_args(arguments)
    plan = plans.compare_plan(given)
    options_a, options_b = plans.side_options(parser, given)
    pairs: list[Pair] = []

    async def measure() -> None:
        async with (
            open_target(given.a, options_a) as a,
            open_target(given.b, options_b) as b,
        ):
            await compare(plan, a, b, Progress(given.quiet), pairs)

    is_complete = _until_done_or_interrupted(measure())
    rows = comparisons(pairs)
    print(comparison_text(given.a, given.b, rows, pairs))
    document = {"a": given.a, "b": given.b, "comparisons": rows, "pairs": pairs}
    _write_json(given.json, {"is_complete": is_complete, **document})
    return _exit_code([report for pair in pairs for report in (pair.a, pair.b)], is_complete)


def _sweep(arguments: Sequence[str]) -> int:
    parser = flags.sweep_parser()
    given = parser.parse_args(arguments)
    plan = plans.sweep_plan(parser, given)
    options = plans.server_options(parser, given)
    reports: list[Report] = []

    async def measure() -> None:
        async with open_target(given.address, options) as target:
            await sweep(plan, target, Progress(given.quiet), reports)

    is_complete = _until_done_or_interrupted(measure())
    print(sweep_text(plan, reports))
    _write_json(given.json, {"is_complete": is_complete, "plan": plan, "reports": reports})
    return _exit_code(reports, is_complete)


# ---------------------------------------------------------------- what they share


def _until_done_or_interrupted(work: Coroutine[None, None, None]) -> bool:
    """False for the latter: whatever `work` adds to is then as far as it got. SIGINT and SIGTERM
    end it; a second one ends the process."""
    return asyncio.run(_interruptible(work))


async def _interruptible(work: Coroutine[None, None, None]) -> bool:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)

    def interrupt() -> None:
        task.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    await asyncio.wait((task,))
    if task.cancelled():
        return False
    task.result()
    return True


def _write_json(path: Path | None, document: dict[str, object]) -> None:
    if path is None:
        return
    whole = {"written_unix_seconds": int(time.time()), **document}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")


def _exit_code(reports: Sequence[Report], is_complete: bool) -> int:
    if not is_complete:
        return _INTERRUPTED
    return _SOME_FAILED if any(report.num_failed for report in reports) else 0
