"""What a caller writes is what the engine reads, and what cannot travel is refused by name."""

from __future__ import annotations

import dataclasses

import pytest

from clients import (
    Accepted,
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    InternalError,
    InvalidRequest,
    PrefillProgress,
    SamplingParams,
    StoppingCriteria,
    StructuredOutput,
    Timing,
    TokenLogprobs,
    Usage,
)
from clients.conversions import event_from_proto, request_to_proto
from clients.testing import encoding
from protos import engine_pb2

FULL = GenerateRequest(
    prompt=(0, 7, 49151),
    request_id="request-1",
    model="smol",
    sampling=SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=-1,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias={7: 100.0, 9: -100.0},
        seed=2**64 - 1,
        n=4,
        allowed_token_ids=(5, 6, 49151),
        bad_token_sequences=((1, 2, 3), (4,)),
    ),
    stopping=StoppingCriteria(max_tokens=5, min_tokens=2, stop_token_ids=(2, 3), ignore_eos=True),
    structured_output=StructuredOutput(json_schema='{"type": "object"}'),
    num_logprobs=3,
    num_prompt_logprobs=2,
    cache_salt="salt",
    priority=-3,
    tenant="team",
    tokenizer_digest="abc",
)


def test_a_request_survives_the_wire() -> None:
    wire = request_to_proto(FULL, "request-1").SerializeToString()
    assert encoding.request_from_proto(engine_pb2.GenerateRequest.FromString(wire)) == FULL


@pytest.mark.parametrize(
    "structured_output",
    [
        StructuredOutput(json_schema="{}", relax_unenforced=True),
        StructuredOutput(json_object=True),
        StructuredOutput(regex="a|ü"),
        StructuredOutput(grammar='root ::= "a"'),
        StructuredOutput(choice=("ü", "", "a")),
        StructuredOutput(structural_tag="{}"),
    ],
)
def test_each_constraint_survives_the_wire(structured_output: StructuredOutput) -> None:
    request = GenerateRequest(prompt=(1,), structured_output=structured_output)
    wire = request_to_proto(request, "").SerializeToString()
    assert encoding.request_from_proto(engine_pb2.GenerateRequest.FromString(wire)) == request


@pytest.mark.parametrize("prompt", ["Grüße 👋", "", (), (5,)])
def test_what_is_absent_stays_absent(prompt: str | tuple[int, ...]) -> None:
    request = GenerateRequest(prompt=prompt)
    message = request_to_proto(request, "id")
    assert message.WhichOneof("prompt") == ("text" if isinstance(prompt, str) else "token_ids")
    assert not message.HasField("priority")
    assert not message.response.HasField("logprobs")
    for field in ("temperature", "top_p", "top_k", "min_p", "seed", "n"):
        assert not message.sampling.HasField(field)
    back = encoding.request_from_proto(message)
    assert dataclasses.replace(back, request_id="") == request


def test_zero_is_not_absent() -> None:
    request = GenerateRequest(
        prompt=(1,),
        num_logprobs=0,
        priority=0,
        sampling=SamplingParams(temperature=0.0, seed=0),
        stopping=StoppingCriteria(max_tokens=0, ignore_eos=False),
    )
    back = encoding.request_from_proto(request_to_proto(request, ""))
    assert back == request


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerateRequest(prompt=(-1,)), "prompt"),
        (GenerateRequest(prompt=(2**32,)), "prompt"),
        (GenerateRequest(prompt="\ud800"), "prompt"),
        (GenerateRequest(prompt=(1,), request_id="with space"), "request_id"),
        (GenerateRequest(prompt=(1,), request_id="ümlaut"), "request_id"),
        (GenerateRequest(prompt=(1,), request_id="line\nbreak"), "request_id"),
        (GenerateRequest(prompt=(1,), sampling=SamplingParams(seed=-1)), "sampling.seed"),
        (GenerateRequest(prompt=(1,), sampling=SamplingParams(n=-1)), "sampling.n"),
        (GenerateRequest(prompt=(1,), sampling=SamplingParams(top_k=2**31)), "sampling.top_k"),
        (
            GenerateRequest(prompt=(1,), sampling=SamplingParams(logit_bias={-5: 1.0})),
            "sampling.logit_bias",
        ),
        (
            GenerateRequest(prompt=(1,), stopping=StoppingCriteria(max_tokens=-1)),
            "stopping.max_tokens",
        ),
        (
            GenerateRequest(prompt=(1,), stopping=StoppingCriteria(stop_token_ids=(-2,))),
            "stopping.stop_token_ids",
        ),
        (GenerateRequest(prompt=(1,), num_logprobs=-1), "num_logprobs"),
        (GenerateRequest(prompt=(1,), priority=2**31), "priority"),
        (GenerateRequest(prompt=(1,), cache_salt="\udfff"), "cache_salt"),
        (GenerateRequest(prompt=(1,), structured_output=StructuredOutput()), "structured_output"),
        (
            GenerateRequest(
                prompt=(1,), structured_output=StructuredOutput("{}", json_object=True)
            ),
            "structured_output",
        ),
        (
            GenerateRequest(
                prompt=(1,), structured_output=StructuredOutput(regex="a", choice=("b",))
            ),
            "structured_output",
        ),
        (
            GenerateRequest(prompt=(1,), structured_output=StructuredOutput(choice=("\ud800",))),
            "structured_output.choice",
        ),
    ],
)
def test_what_cannot_travel_is_refused_by_name(request_: GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        request_to_proto(request_, request_.request_id)
    assert [violation.field for violation in refusal.value.field_violations] == [field]
    assert field in refusal.value.message


LOGPROBS = (
    TokenLogprobs(logprob=-0.25, rank=1, top=((5, -0.25), (9, -1.5))),
    TokenLogprobs(logprob=-3.0, rank=7, top=()),
)
USAGE = Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=2)
TIMING = Timing(
    queue_seconds=0.5,
    grammar_wait_seconds=0.25,
    prefill_seconds=0.125,
    first_token_seconds=0.75,
    decode_seconds=2.0,
    prefill_chunks=3,
    cached_tokens=4,
    preemptions=1,
    first_step_id=99,
)


def test_events_survive_the_wire() -> None:
    delta = engine_pb2.GenerateEvent(index=2, delta=encoding.delta_to_proto((5, 6), LOGPROBS))
    assert event_from_proto(delta) == Delta(2, (5, 6), LOGPROBS)
    for reason in FinishReason:
        finished = encoding.finished_to_proto(reason, 0, USAGE, TIMING)
        event = event_from_proto(engine_pb2.GenerateEvent(index=1, finished=finished))
        assert event == Finished(1, reason, USAGE, TIMING, stop_token_id=0)
    progress = engine_pb2.PrefillProgress(prompt_tokens=9, computed_tokens=6, cached_tokens=4)
    assert event_from_proto(
        engine_pb2.GenerateEvent(index=3, prefill_progress=progress)
    ) == PrefillProgress(3, 9, 6, 4)
    accepted = engine_pb2.Accepted(request_id="x", prompt_tokens=9, max_tokens=16)
    assert event_from_proto(engine_pb2.GenerateEvent(accepted=accepted)) == Accepted("x", 9, 16)
    accepted.relaxed.append("$.multipleOf")
    relaxed = event_from_proto(engine_pb2.GenerateEvent(accepted=accepted))
    assert relaxed == Accepted("x", 9, 16, ("$.multipleOf",))


def test_no_stop_token_is_none() -> None:
    finished = encoding.finished_to_proto(FinishReason.LENGTH, None, USAGE, TIMING)
    event = event_from_proto(engine_pb2.GenerateEvent(finished=finished))
    assert isinstance(event, Finished)
    assert event.stop_token_id is None


def test_an_event_of_a_newer_engine_is_skipped() -> None:
    assert event_from_proto(engine_pb2.GenerateEvent(seq=3)) is None


def test_nonsense_from_the_engine_is_an_internal_error() -> None:
    with pytest.raises(InternalError, match="finish reason"):
        event_from_proto(engine_pb2.GenerateEvent(finished=engine_pb2.Finished()))
    torn = engine_pb2.Delta(token_ids=[1], logprobs=[engine_pb2.TokenLogprobs(top_token_ids=[1])])
    with pytest.raises(InternalError, match="log probabilities"):
        event_from_proto(engine_pb2.GenerateEvent(delta=torn))
