"""Who else was in the steps that a request waited for, or was computed in, and with how much.

    queue     | step | step | (unrecorded) | step |     each stands for the time up to the next one
    prefill   | own + others | own + others |           each for itself

A step is divided by tokens: a request that had 100 of 128 is told 100/128 of its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from traces import names
from traces.request_view import EngineCall, Step


@dataclass(slots=True)
class Neighbour:
    request_id: str
    trace_id: str = ""  # empty: not traced, or not known
    num_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    seconds: float = 0.0  # of the time to the first token


def neighbours_of(call: EngineCall) -> list[Neighbour]:
    """The largest first."""
    found: dict[str, Neighbour] = {}
    for step, seconds in _steps(call):
        for share in step.shares:
            if share.request_id == call.request_id:
                continue
            neighbour = found.setdefault(share.request_id, Neighbour(share.request_id))
            neighbour.trace_id = neighbour.trace_id or share.trace_id
            neighbour.num_steps += 1
            neighbour.seconds += seconds * share.num_tokens / max(step.num_tokens, 1)
            if share.is_prefill:
                neighbour.prefill_tokens += share.num_tokens
            else:
                neighbour.decode_tokens += share.num_tokens
    return sorted(found.values(), key=lambda neighbour: -neighbour.seconds)


def _steps(call: EngineCall) -> Iterator[tuple[Step, float]]:
    """Each with the seconds of the request's time that it stands for."""
    queue = call.stages.get(names.SPAN_QUEUE)
    if queue is not None:
        ends = [step.start_unix_ns for step in call.queue_steps[1:]] + [queue["end_unix_ns"]]
        for step, end in zip(call.queue_steps, ends, strict=False):
            start = max(step.start_unix_ns, queue["start_unix_ns"])
            yield step, max(end - start, 0) * 1e-9
    for step in call.prefill_steps:
        yield step, (step.end_unix_ns - step.start_unix_ns) * 1e-9
