"""An explanation, drawn for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from traces.explain.explanation import Explanation
from traces.explain.neighbours import Neighbour
from traces.explain.parts import Part

_BAR_COLUMNS: Final = 40
_MAX_ROWS_OF_A_PART: Final = 6  # more are drawn as one
_MAX_NEIGHBOURS: Final = 8


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    start_ns: int
    end_ns: int
    seconds: float
    detail: str


def rows_of(parts: Sequence[Part]) -> list[Row]:
    """A part a row; but where one of a name comes too often, all of that name are one row."""
    by_name: dict[str, list[Part]] = {}
    for part in parts:
        by_name.setdefault(part.name, []).append(part)
    rows = []
    for name, same in by_name.items():
        if len(same) <= _MAX_ROWS_OF_A_PART:
            rows += [Row(name, p.start_ns, p.end_ns, p.seconds, p.detail) for p in same]
            continue
        seconds = sum(part.seconds for part in same)
        end_ns = max(part.end_ns for part in same)
        rows.append(Row(name, same[0].start_ns, end_ns, seconds, f"{len(same)} times"))
    return sorted(rows, key=lambda row: (row.start_ns, row.end_ns))


def waterfall(explanation: Explanation) -> str:
    total = max(explanation.total_seconds, 1e-9)
    lines = [_headline(explanation), ""]
    for row in rows_of(explanation.parts):
        bar = _bar(row.start_ns * 1e-9 / total, row.end_ns * 1e-9 / total)
        share = row.seconds / total
        detail = f"  {row.detail}" if row.detail else ""
        lines.append(f"{row.name:<22}{_ms(row.seconds)} {share:>4.0%} |{bar}|{detail}")
    unattributed = explanation.unattributed_seconds
    lines.append(f"{'unattributed':<22}{_ms(unattributed)} {unattributed / total:>4.0%}")
    lines += ["", explanation.sentence()]
    if advice := explanation.advice():
        lines.append(f"What would have helped: {advice}.")
    prefix = explanation.prefix_text()
    if prefix and prefix != advice:
        lines.append(f"Prefix: {prefix}.")
    if explanation.neighbours:
        lines += ["", *_neighbours(explanation.neighbours)]
    return "\n".join(lines)


def _headline(explanation: Explanation) -> str:
    trace_id, share = explanation.view.trace_id, explanation.attributed_share
    if explanation.ttft_seconds is None:
        return (
            f"trace {trace_id}: no first token, {explanation.ending or 'ended'} after"
            f" {explanation.total_seconds:.3f} s, {share:.1%} of them attributed"
        )
    return (
        f"trace {trace_id}: first token after {explanation.ttft_seconds:.3f} s,"
        f" {share:.1%} of them attributed"
    )


def _neighbours(neighbours: Sequence[Neighbour]) -> list[str]:
    lines = ["Who shared the steps that it waited for or was computed in:"]
    for neighbour in neighbours[:_MAX_NEIGHBOURS]:
        tokens = f"{neighbour.prefill_tokens:>6} prompt {neighbour.decode_tokens:>5} generated"
        trace = f"  trace {neighbour.trace_id}" if neighbour.trace_id else ""
        lines.append(
            f"{_ms(neighbour.seconds)}  {neighbour.num_steps:>4} steps {tokens}"
            f"  {neighbour.request_id}{trace}"
        )
    if (left := len(neighbours) - _MAX_NEIGHBOURS) > 0:
        lines.append(f"    and {left} more")
    return lines


def _bar(start: float, end: float) -> str:
    """At least one column for whatever there was."""
    first = min(int(start * _BAR_COLUMNS), _BAR_COLUMNS - 1)
    last = min(max(round(end * _BAR_COLUMNS), first + 1), _BAR_COLUMNS)
    return " " * first + "█" * (last - first) + " " * (_BAR_COLUMNS - last)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:>10.1f} ms"
