"""Spans of a Generate call: what is remembered of it, and that nothing is once it is over."""

from __future__ import annotations

import time
from collections.abc import Generator

import pytest

from engine_service.errors import EngineUnavailable
from engine_service.messages import (
    AddRequest,
    Finish,
    FinishReason,
    RequestTiming,
    SamplingParams,
    StepRecord,
    StepShare,
    StoppingCriteria,
)
from engine_service.request_spans import GenerateSpan, generate_span
from engine_service.slow_traces import SlowTraces
from engine_service.step_spans import StepSpans
from traces.setup import Tracing


class Bench:
    def __init__(self) -> None:
        self.steps = StepSpans()
        self.now_ns = time.monotonic_ns()

    def call(self) -> Generator[GenerateSpan, None, None]:
        slow = SlowTraces(Tracing(), 1.0)
        with generate_span((), lambda: None, self.now_ns, self.steps, slow) as span:
            span.is_recording = True  # as if a provider recorded: the tests' process has none
            yield span

    def is_empty(self) -> bool:
        return not self.steps._samples and not self.steps._trace_ids


@pytest.fixture
def bench() -> Bench:
    return Bench()


def request(n: int = 1) -> AddRequest:
    return AddRequest("mine", [1, 2], SamplingParams(), StoppingCriteria(max_tokens=4), n=n)


def finish(now_ns: int, reason: FinishReason = FinishReason.LENGTH) -> Finish:
    return Finish(reason, RequestTiming(now_ns, finished_ns=now_ns))


def test_what_was_refused_leaves_nothing(bench: Bench) -> None:
    call = bench.call()
    span = next(call)
    span.checked(request(), "model")
    with pytest.raises(EngineUnavailable):
        call.throw(EngineUnavailable("full"))
    assert bench.is_empty()


@pytest.mark.parametrize("end", ["finish", "abort", "core lost"])
def test_each_sample_is_forgotten_at_its_end(bench: Bench, end: str) -> None:
    call = bench.call()
    span = next(call)
    span.checked(request(n=2), "model")
    span.admitted(2)
    assert not bench.is_empty()
    span.first_token(0, bench.now_ns, bench.now_ns)
    awaited = [span.awaits_write]
    span.written(0, bench.now_ns)
    assert [*awaited, span.awaits_write] == [True, False]
    assert next(call, None) is None  # the call is over before its samples are
    for index in range(2):
        match end:
            case "finish":
                span.sample_finished(index, finish(bench.now_ns))
            case "abort":
                span.sample_finished(index, finish(bench.now_ns, FinishReason.ABORT))
            case _:
                span.sample_lost(index)
    assert bench.is_empty()


def test_a_step_touches_those_in_it_those_told_and_those_who_came_while_it_ran(
    bench: Bench,
) -> None:
    calls = []
    for request_id in ("computed", "told", "came", "before"):
        call = bench.call()
        span = next(call)
        calls.append((call, span))
        span.checked(AddRequest(request_id, [1], SamplingParams(), StoppingCriteria(4)), "model")
        span.admitted(1)
    samples = {key[0]: sample for key, sample in bench.steps._samples.items()}
    start_ns = samples["came"].submitted_ns
    samples["before"].submitted_ns = samples["computed"].submitted_ns = start_ns - 5
    samples["told"].submitted_ns = start_ns - 5
    bench.steps.add([record(start_ns - 2, shares=["computed", "else"], waiting=["told"])])
    assert [len(samples[name].prefill_steps) for name in samples] == [1, 0, 0, 0]
    assert [len(samples[name].queue_steps) for name in samples] == [0, 1, 1, 0]
    assert [samples[name].came_during_step for name in samples] == [False, False, True, False]
    for call, _ in calls:
        assert next(call, None) is None


def record(drained_ns: int, shares: list[str], waiting: list[str]) -> StepRecord:
    return StepRecord(
        step_id=1,
        drained_ns=drained_ns,
        scheduled_ns=drained_ns + 1,
        start_ns=drained_ns + 2,
        mask_ns=drained_ns + 3,
        batch_ns=drained_ns + 4,
        forward_ns=drained_ns + 5,
        end_ns=drained_ns + 6,
        updated_ns=drained_ns + 7,
        token_budget=128,
        num_tokens=2,
        num_requests=len(shares),
        num_prefill_tokens=1,
        num_preemptions=0,
        num_waiting=len(waiting),
        num_free_blocks=3,
        shares=[StepShare(request_id, 0, 0, 1, 0, True) for request_id in shares],
        waiting=[(request_id, 0) for request_id in waiting],
    )
