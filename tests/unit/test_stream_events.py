"""Events of one stream: order, sequence numbers, usage, timing."""

from __future__ import annotations

from engine_service.collector import SampleEvents
from engine_service.messages import (
    AddRequest,
    Finish,
    FinishReason,
    PrefillChunk,
    RequestTiming,
    SamplingParams,
    StoppingCriteria,
    TokenLogprobs,
)
from engine_service.stream_events import EventBuilder, timing_message
from protos import engine_pb2 as pb

TIMING = RequestTiming(
    arrival_ns=1_000_000,
    taken_ns=2_000_000,
    grammar_ready_ns=3_500_000,
    first_scheduled_ns=6_000_000,
    first_token_ns=10_000_000,
    finished_ns=15_000_000,
    num_preemptions=1,
    first_step_id=4,
    num_cached_tokens=16,
    prefill_chunks=(PrefillChunk(4, 6_000_000, 8_000_000, 16),) * 2,
)


def builder(n: int = 2) -> EventBuilder:
    request = AddRequest(
        "r", list(range(20)), SamplingParams(), StoppingCriteria(max_tokens=9), n=n
    )
    return EventBuilder(request)


def test_a_streams_events() -> None:
    events = builder()
    finish = Finish(FinishReason.STOP, TIMING, stop_token_id=2)
    stream = [
        events.accepted(),
        *events.events(SampleEvents(1, num_prefilled_tokens=18, num_cached_tokens=16)),
        *events.events(
            SampleEvents(
                1,
                num_prefilled_tokens=20,
                num_cached_tokens=16,
                token_ids=[7, 8],
                logprobs=[TokenLogprobs(-0.5, 2, [3], [-0.25])] * 2,
            )
        ),
        *events.events(SampleEvents(0, token_ids=[4])),
        *events.events(SampleEvents(1, token_ids=[2], finish=finish)),
    ]
    assert [event.seq for event in stream] == list(range(len(stream)))
    assert [(event.WhichOneof("event"), event.index) for event in stream] == [
        ("accepted", 0),
        ("prefill_progress", 1),
        ("prefill_progress", 1),
        ("delta", 1),
        ("delta", 0),
        ("delta", 1),
        ("finished", 1),
    ]
    assert stream[0].accepted == pb.Accepted(request_id="r", prompt_tokens=20, max_tokens=9)
    assert stream[2].prefill_progress == pb.PrefillProgress(
        prompt_tokens=20, computed_tokens=20, cached_tokens=16
    )
    assert list(stream[3].delta.token_ids) == [7, 8]
    assert stream[3].delta.logprobs[1] == pb.TokenLogprobs(
        logprob=-0.5, rank=2, top_token_ids=[3], top_logprobs=[-0.25]
    )
    finished = stream[-1].finished
    assert finished.reason == pb.FINISH_REASON_STOP
    assert finished.stop_token_id == 2
    assert finished.usage == pb.Usage(prompt_tokens=20, cached_tokens=16, completion_tokens=3)
    assert events.num_output_tokens == 4


def test_only_what_was_computed_is_used() -> None:
    events = builder(n=1)
    events.accepted()
    assert events.num_used_tokens == 0
    ended = Finish(FinishReason.ABORT, TIMING)
    list(events.events(SampleEvents(0, finish=ended)))  # in the queue
    assert events.num_used_tokens == 0
    list(events.events(SampleEvents(0, num_prefilled_tokens=18)))
    assert events.num_used_tokens == 20
    list(events.events(SampleEvents(0, token_ids=[7, 8])))
    assert events.num_used_tokens == 22


def test_prompt_logprobs_travel_with_the_progress() -> None:
    told = [TokenLogprobs(-0.5, 2, [3], [-0.25]), TokenLogprobs(-1.5, 9, [4], [-0.125])]
    sample = SampleEvents(0, num_prefilled_tokens=3, prompt_logprobs=told)
    (event,) = builder().events(sample)
    assert [one.logprob for one in event.prefill_progress.prompt_logprobs] == [-0.5, -1.5]
    assert list(event.prefill_progress.prompt_logprobs[1].top_token_ids) == [4]


def test_an_absent_stop_token_stays_absent() -> None:
    (event,) = builder().events(SampleEvents(0, finish=Finish(FinishReason.LENGTH, TIMING)))
    assert event.finished.reason == pb.FINISH_REASON_LENGTH
    assert not event.finished.HasField("stop_token_id")


def test_timing_adds_up() -> None:
    timing = timing_message(TIMING)
    assert timing == pb.Timing(
        queue_us=3_500,  # on its way to the core, and after its grammar was there
        grammar_wait_us=1_500,
        prefill_us=4_000,
        first_token_us=9_000,
        decode_us=5_000,
        prefill_chunks=2,
        cached_tokens=16,
        preemptions=1,
        first_step_id=4,
    )
    assert timing.grammar_wait_us + timing.queue_us + timing.prefill_us == timing.first_token_us


def test_timing_of_a_request_that_never_ran() -> None:
    timing = timing_message(RequestTiming(arrival_ns=1_000, finished_ns=9_000))
    assert timing == pb.Timing(queue_us=8)
