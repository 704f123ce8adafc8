"""Where the first tokens of many requests lost their time: causes ranked, with percentiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from traces.explain.causes import KINDS, OTHERS, Kind
from traces.explain.explanation import Explanation, as_json, explain
from traces.request_reader import Alike, SlowestRequests
from traces.request_view import RequestView

PERCENTILES: Final = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class RankedCause:
    kind: Kind
    seconds: float  # of all the requests together
    num_top: int  # requests of which it is the first cause
    percentiles: dict[int, float]  # seconds a request, those without it included


@dataclass(frozen=True, slots=True)
class Ranking:
    explanations: list[Explanation]  # of those ranked, the slowest first
    num_requests: int  # with a first token, in the range asked for
    ttft_percentiles: dict[int, float]  # seconds, of all of those
    causes: list[RankedCause]  # of the explanations, by seconds
    missed_prefixes: dict[str, int]  # requests by why a cached prefix was of no use


def rank(views: Sequence[RequestView], slowest: int | None = None) -> Ranking:
    """Of those that had a first token; `slowest`: the causes of only so many are ranked.

    `views` by start.
    """
    had = [view for view in views if view.ttft_seconds is not None]
    by_time = sorted(had, key=_ttft, reverse=True)
    return _ranking(by_time[:slowest], Alike(views), [_ttft(view) for view in had])


def rank_slowest(found: SlowestRequests) -> Ranking:
    return _ranking(found.views, Alike(found.others), found.all_seconds)


def _ranking(views: Iterable[RequestView], alike: Alike, all_seconds: Sequence[float]) -> Ranking:
    """`views`: the slowest first; `all_seconds`: of these and of those that are not ranked."""
    ranked = [explain(view, alike.before(view)) for view in views]
    causes = []
    for kind in KINDS:
        seconds = [_seconds(one, kind) for one in ranked]
        if not any(seconds):
            continue
        num_top = sum(one.top is not None and one.top.kind is kind for one in ranked)
        causes.append(RankedCause(kind, sum(seconds), num_top, percentiles(seconds)))
    missed = Counter(one.prefix.missed for one in ranked if one.prefix and one.prefix.missed)
    return Ranking(
        explanations=ranked,
        num_requests=len(all_seconds),
        ttft_percentiles=percentiles(all_seconds),
        causes=sorted(causes, key=lambda cause: -cause.seconds),
        missed_prefixes=dict(missed),
    )


def percentiles(values: Sequence[float]) -> dict[int, float]:
    """The smallest value that at least so many percent of all are not above; none of none."""
    if not values:
        return {}
    ordered = sorted(values)
    return {p: ordered[max(-(-p * len(ordered) // 100) - 1, 0)] for p in PERCENTILES}


def _ttft(view: RequestView) -> float:
    return view.ttft_seconds or 0.0


def _seconds(explanation: Explanation, kind: Kind) -> float:
    return sum(cause.seconds for cause in explanation.causes if cause.kind is kind)


# ---------------------------------------------------------------- written


def ranking_json(ranking: Ranking) -> dict[str, object]:
    return {
        "num_requests": ranking.num_requests,
        "ttft_seconds": {f"p{p}": value for p, value in ranking.ttft_percentiles.items()},
        "causes": [
            {
                "cause": cause.kind.name,
                "seconds": cause.seconds,
                "num_top": cause.num_top,
                **{f"p{p}_seconds": value for p, value in cause.percentiles.items()},
                "knob": cause.kind.knob,
            }
            for cause in ranking.causes
        ],
        "missed_prefixes": ranking.missed_prefixes,
        "traces": [as_json(one, max_neighbours=5) for one in ranking.explanations],
    }


def ranking_text(ranking: Ranking) -> str:
    ttft = ", ".join(f"p{p} {_ms(v)}" for p, v in ranking.ttft_percentiles.items())
    lines = [f"{ranking.num_requests} requests with a first token: {ttft}", ""]
    total = sum(cause.seconds for cause in ranking.causes) or 1.0
    heads = "".join(f"{f'p{p}':>12}" for p in PERCENTILES)
    count = len(ranking.explanations)
    lines.append(f"{f'cause, of the {count} slowest':<26}{'share':>6}{'first for':>11}{heads}")
    for cause in ranking.causes:
        values = "".join(f"{_ms(cause.percentiles[p]):>12}" for p in PERCENTILES)
        share = f"{cause.seconds / total:.0%}"
        lines.append(f"{cause.kind.name:<26}{share:>6}{cause.num_top:>11}{values}")
    if ranking.causes and ranking.causes[0].seconds:
        lines += ["", f"What would help most: {ranking.causes[0].kind.knob}."]
    for why, number in sorted(ranking.missed_prefixes.items()):
        lines.append(f"{number} of them computed a prefix again that had been cached: {why}.")
    lines += ["", "the slowest"]
    traces = Counter(one.view.trace_id for one in ranking.explanations)
    for one in ranking.explanations:
        name = one.view.trace_id if traces[one.view.trace_id] == 1 else one.view.request_id
        lines.append(f"{name}  {_ms(one.total_seconds):>10}  {_first_cause(one)}")
    return "\n".join(lines)


def _first_cause(explanation: Explanation) -> str:
    top = explanation.top
    if top is None:
        return ""
    text = f"{top.seconds / max(explanation.total_seconds, 1e-9):>4.0%} {top.kind.name}"
    if top.kind is OTHERS and explanation.neighbours:
        first = explanation.neighbours[0]
        text += f", most to {first.trace_id or first.request_id}"
    return text


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
