"""One request's time to first token, explained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from traces import names
from traces.explain.causes import OTHERS, PREFILL, Cause, causes_of, kind_of
from traces.explain.neighbours import Neighbour, neighbours_of
from traces.explain.parts import Part, parts_of
from traces.explain.prefix_reuse import PrefixReuse, prefix_reuse
from traces.request_view import RequestView, text_of

_MISSED: Final = {
    "salt": "had been computed for {trace}, under another cache_salt or tenant, which may not"
    " share it",
    "evicted": "had been computed for {trace}, and was gone: evicted for others (more KV blocks"
    " would have kept it), flushed, or caching is off",
    "template": "begins with the same message as {trace}, but the template, its arguments or the"
    " tools put something else before it or into it: what changes belongs at the end",
}


# Somebody had no more time for it.
_TOO_LATE: Final = ("client_gone", "deadline_exceeded", "CANCELLED", "DEADLINE_EXCEEDED")


@dataclass(frozen=True, slots=True)
class Explanation:
    view: RequestView
    ttft_seconds: float | None  # None: there was no first token
    total_seconds: float  # to the first token, or to the end
    parts: list[Part]
    unattributed_seconds: float
    causes: list[Cause]  # the largest first
    neighbours: list[Neighbour]
    prefix: PrefixReuse | None

    @property
    def attributed_share(self) -> float:
        """Of the time to the first token, or to the end."""
        if self.total_seconds <= 0:
            return 1.0
        return 1.0 - self.unattributed_seconds / self.total_seconds

    @property
    def ending(self) -> str:
        """What it ended with, if that was an error; else empty."""
        root = self.view.root
        return root["status"]["message"] or text_of(root, names.ERROR_TYPE)

    @property
    def top(self) -> Cause | None:
        return self.causes[0] if self.causes else None

    def sentence(self) -> str:
        """The first of the causes."""
        if self.top is None:
            return "Nothing is known of where the time went."
        seconds, share = self.top.seconds, self.top.seconds / max(self.total_seconds, 1e-9)
        what = f"{_time(seconds)} of {_time(self.total_seconds)} ({share:.0%}) went to"
        text = f"{what} {self.top.kind.says}"
        if self.top.kind is OTHERS and self.neighbours:
            first = self.neighbours[0]
            text += f", most to {_name(first, self.view)} ({_tokens(first)})"
        return text + "."

    def advice(self) -> str:
        """The knob that would have helped, and what is known of the prefix; empty for what failed,
        however long it took."""
        if self.top is None or (self.ttft_seconds is None and self.ending not in _TOO_LATE):
            return ""
        if self.top.kind is PREFILL and self.prefix is not None:
            if self.prefix.missed:
                return self.prefix_text()
            if self.prefix.is_cached:
                return "a faster machine: of its prompt only the last tokens were not cached"
        return self.top.kind.knob

    def prefix_text(self) -> str:
        """What of the prompt came from the cache, and why not more of it."""
        prefix = self.prefix
        if prefix is None:
            return ""
        text = f"{prefix.cached_tokens} of {prefix.prompt_tokens} prompt tokens were cached"
        if not prefix.missed:
            return text
        tokens = f"at least {prefix.missed_tokens} " if prefix.missed_tokens else "it "
        return f"{text}; {tokens}" + _MISSED[prefix.missed].format(trace=prefix.earlier_trace_id)


def explain(view: RequestView, others: Iterable[RequestView] = ()) -> Explanation:
    """`others`: requests of the store, for what is said of the prefix."""
    parts = parts_of(view)
    ttft = view.ttft_seconds
    total = (view.root["end_unix_ns"] - view.root["start_unix_ns"]) * 1e-9 if ttft is None else ttft
    return Explanation(
        view=view,
        ttft_seconds=ttft,
        total_seconds=total,
        parts=parts,
        unattributed_seconds=max(total - _covered_seconds(parts, total), 0.0),
        causes=causes_of(parts),
        neighbours=neighbours_of(view.call) if view.call else [],
        prefix=prefix_reuse(view, others),
    )


def _covered_seconds(parts: Sequence[Part], total_seconds: float) -> float:
    """Of the union of the parts: what two of them cover counts once."""
    end_ns, covered_ns, reached_ns = round(total_seconds * 1e9), 0, 0
    for part in parts:
        start, end = max(part.start_ns, reached_ns), min(part.end_ns, end_ns)
        if end > start:
            covered_ns += end - start
            reached_ns = end
    return covered_ns * 1e-9


def as_json(explanation: Explanation, *, max_neighbours: int = 50) -> dict[str, object]:
    """For programs; times in seconds, `start_seconds` since the request began."""
    top, prefix = explanation.top, explanation.prefix
    total = max(explanation.total_seconds, 1e-9)
    neighbours = explanation.neighbours
    return {
        "trace_id": explanation.view.trace_id,
        "request_id": explanation.view.request_id,
        "ttft_seconds": explanation.ttft_seconds,
        "total_seconds": explanation.total_seconds,
        "attributed_share": explanation.attributed_share,
        "unattributed_seconds": explanation.unattributed_seconds,
        "cause": None if top is None else top.kind.name,
        "sentence": explanation.sentence(),
        "advice": explanation.advice(),
        "causes": [
            {
                "cause": cause.kind.name,
                "seconds": cause.seconds,
                "share": cause.seconds / total,
                "knob": cause.kind.knob,
            }
            for cause in explanation.causes
        ],
        "parts": [
            {
                "name": part.name,
                "cause": kind_of(part.name).name,
                "start_seconds": part.start_ns * 1e-9,
                "end_seconds": part.end_ns * 1e-9,
                "seconds": part.seconds,
                "share": part.seconds / total,
                "detail": part.detail,
            }
            for part in explanation.parts
        ],
        "neighbours": [
            {
                "request_id": neighbour.request_id,
                "trace_id": neighbour.trace_id,
                "steps": neighbour.num_steps,
                "prefill_tokens": neighbour.prefill_tokens,
                "decode_tokens": neighbour.decode_tokens,
                "seconds": neighbour.seconds,
            }
            for neighbour in neighbours[:max_neighbours]
        ],
        "neighbours_left_out": max(len(neighbours) - max_neighbours, 0),
        "prefix": None
        if prefix is None
        else {
            "prompt_tokens": prefix.prompt_tokens,
            "cached_tokens": prefix.cached_tokens,
            "missed": prefix.missed or None,
            "missed_tokens": prefix.missed_tokens,
            "earlier_trace_id": prefix.earlier_trace_id or None,
        },
    }


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _name(neighbour: Neighbour, view: RequestView) -> str:
    if neighbour.trace_id == view.trace_id:  # another prompt of it, or of the same trace
        return f"request {neighbour.request_id} of the same trace"
    trace = f" (trace {neighbour.trace_id})" if neighbour.trace_id else ""
    return f"request {neighbour.request_id}{trace}"


def _tokens(neighbour: Neighbour) -> str:
    parts = []
    if neighbour.prefill_tokens:
        parts.append(f"{neighbour.prefill_tokens} prompt tokens")
    if neighbour.decode_tokens:
        parts.append(f"{neighbour.decode_tokens} generated")
    return f"{' and '.join(parts)} in {neighbour.num_steps} steps"
