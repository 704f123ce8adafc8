"""Spans of the engine service: under the caller's, ended whatever happens, none when unsampled."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from protos import engine_pb2 as pb
from tests.conftest import MakeTinyModel
from tests.running_engine import (
    ENDLESS,
    LONG_CONTEXT,
    ROOM_FOR_ENDLESS,
    Client,
    client,
    engine_process,
    request,
)
from traces import names
from traces.stored_spans import StoredSpan, read_spans

PARENT = "00f067aa0ba902b7"

HELD = "firsttoken=held"
FAST = [f"fast-{number}" for number in range(5)]  # a busy machine makes some of them slow


def trace_id(number: int) -> str:
    return f"{number:032x}"


async def generate(
    engine_client: Client,
    message: pb.GenerateRequest,
    traceparent: str,
    *,
    state: str = "",
    cancel: bool = False,
    timeout: float | None = None,
) -> None:
    metadata = (("traceparent", traceparent), ("tracestate", state))
    call = engine_client.engine.Generate(message, metadata=metadata, timeout=timeout)
    try:
        while (event := await call.read()) is not None:
            if not isinstance(event, pb.GenerateEvent):
                break
            if cancel and event.HasField("delta"):
                call.cancel()
    except (Exception, asyncio.CancelledError):
        pass


def sampled(number: int) -> str:
    return f"00-{trace_id(number)}-{PARENT}-01"


@pytest.fixture(scope="module")
def spans(
    tiny_model_dir: MakeTinyModel, tmp_path_factory: pytest.TempPathFactory
) -> list[StoredSpan]:
    """Of one engine, after all kinds of calls."""
    work_dir = tmp_path_factory.mktemp("traces")
    flags = (
        f"--trace-dir={work_dir}",
        "--trace-sample-ratio=0",
        "--trace-slow-ttft-ms=300",
        "--max-num-batched-tokens=64",
        ROOM_FOR_ENDLESS,
    )

    async def calls(address: str) -> None:
        async with client(address) as engine_client:
            chunked = request(prompt=list(range(500, 600)), max_tokens=4)
            other = request(prompt=list(range(700, 800)), max_tokens=4)
            grammar = request(prompt="x", max_tokens=8)
            grammar.structured_output.json_object = True
            slow = request(request_id="slow", prompt="x", max_tokens=8)  # loads the compiler
            slow.structured_output.json_object = True
            invalid = request()
            invalid.sampling.temperature = 9
            await generate(engine_client, chunked, sampled(1))  # alone: two steps, of 64 and 36
            await asyncio.gather(
                generate(engine_client, grammar, sampled(2)),
                generate(engine_client, request(max_tokens=ENDLESS), sampled(3), cancel=True),
                generate(engine_client, invalid, sampled(4)),
                generate(engine_client, request(), f"00-{trace_id(5)}-{PARENT}-00"),
                generate(engine_client, request(request_id="nonsense"), "nonsense"),
                generate(engine_client, slow, ""),
                generate(engine_client, request(n=2, max_tokens=3), sampled(7)),
                generate(engine_client, other, f"00-{trace_id(9)}-{PARENT}-00", state=HELD),
                generate(engine_client, other, f"00-{trace_id(10)}-{PARENT}-00", state=HELD),
            )
            kept = pb.KeepTracesRequest(trace_ids=[trace_id(9), trace_id(5)])
            await engine_client.engine.KeepTraces(kept)
            for trace_ids in (["xyz"], [trace_id(1)] * 257):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await engine_client.engine.KeepTraces(pb.KeepTracesRequest(trace_ids=trace_ids))
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await generate(engine_client, request(max_tokens=ENDLESS), sampled(8), timeout=3)
            for request_id in FAST:
                await generate(engine_client, request(request_id=request_id, max_tokens=2), "")
            await engine_client.wait_idle(20)

    with engine_process(tiny_model_dir("llama", **LONG_CONTEXT), work_dir, *flags) as engine:
        asyncio.run(calls(engine.grpc))
    return list(read_spans(work_dir))  # it flushed when it left


def of_trace(spans: list[StoredSpan], number: int) -> dict[str, StoredSpan]:
    return {span["name"]: span for span in spans if span["trace_id"] == trace_id(number)}


SERVER = "firsttoken.v1.Engine/Generate"


def test_the_server_span_is_the_callers_child(spans: list[StoredSpan]) -> None:
    server = of_trace(spans, 1)[SERVER]
    assert (server["kind"], server["parent_span_id"]) == ("SERVER", PARENT)
    assert server["status"]["code"] == "UNSET"
    assert server["attributes"]["rpc.system"] == "grpc"
    assert server["attributes"]["rpc.grpc.status_code"] == 0
    assert server["attributes"]["firsttoken.prompt_tokens"] == 100
    assert server["attributes"]["gen_ai.usage.output_tokens"] == 4


def test_the_stages_follow_one_another_under_it(spans: list[StoredSpan]) -> None:
    trace = of_trace(spans, 1)
    assert set(trace) == {SERVER, "admit", "queue", "prefill", "deliver", "decode"}
    server = trace[SERVER]
    for name in ("admit", "queue", "prefill", "deliver", "decode"):
        assert trace[name]["parent_span_id"] == server["span_id"]
    assert trace["admit"]["start_unix_ns"] == server["start_unix_ns"]
    assert trace["queue"]["start_unix_ns"] == trace["admit"]["end_unix_ns"]
    assert trace["deliver"]["start_unix_ns"] == trace["prefill"]["end_unix_ns"]
    assert trace["queue"]["end_unix_ns"] == trace["prefill"]["start_unix_ns"]
    assert trace["prefill"]["end_unix_ns"] == trace["decode"]["start_unix_ns"]
    assert trace["decode"]["end_unix_ns"] <= server["end_unix_ns"]
    events = [event for event in trace["prefill"]["events"] if event["name"] != "wait"]
    assert [event["name"] for event in events] == ["prefill_chunk"] * 2 + ["first_token"]
    assert sum(int(str(e["attributes"].get("firsttoken.chunk_tokens", 0))) for e in events) == 100


def test_a_trace_that_was_held_is_there_once_somebody_keeps_it(spans: list[StoredSpan]) -> None:
    trace = of_trace(spans, 9)
    assert set(trace) == {SERVER, "admit", "queue", "prefill", "deliver", "decode"}
    steps = {span["trace_id"] for span in spans if span["name"] == "engine.step"}
    assert {link["trace_id"] for link in trace["prefill"]["links"]} <= steps


def test_a_slow_trace_that_begins_here_is_kept_a_fast_one_is_not(spans: list[StoredSpan]) -> None:
    kept = {span["name"] for span in spans if span["trace_id"] == of_request(spans, "slow")}
    assert {SERVER, "admit", "queue", "grammar_compile", "prefill", "decode"} <= kept
    assert "" in [of_request(spans, request_id) for request_id in FAST]


def of_request(spans: list[StoredSpan], request_id: str) -> str:
    """Its trace id; empty: there is none."""
    ids = [s["trace_id"] for s in spans if s["attributes"].get(names.REQUEST_ID) == request_id]
    return ids[0] if ids else ""


def test_a_grammar_has_its_own_stage(spans: list[StoredSpan]) -> None:
    trace = of_trace(spans, 2)
    grammar, queue = trace["grammar_compile"], trace["queue"]
    assert grammar["parent_span_id"] == queue["span_id"]
    assert queue["start_unix_ns"] <= grammar["start_unix_ns"] < grammar["end_unix_ns"]
    assert grammar["end_unix_ns"] <= queue["end_unix_ns"]
    assert "grammar" in waits(queue)


def test_waits_and_chunks_fill_queue_and_prefill(spans: list[StoredSpan]) -> None:
    """No gap and no overlap but for the loop between two steps of its own."""
    for number in (1, 2, 7):
        trace = of_trace(spans, number)
        queued = trace["queue"]["end_unix_ns"] - trace["queue"]["start_unix_ns"]
        assert sum(waits(trace["queue"]).values()) == pytest.approx(queued / 1e9, abs=20e-6)


def waits(span: StoredSpan) -> dict[str, float]:
    """Seconds by reason."""
    seconds: dict[str, float] = {}
    for event in span["events"]:
        if event["name"] == "wait":
            reason = str(event["attributes"]["firsttoken.wait.reason"])
            duration_us = event["attributes"]["firsttoken.wait.duration_us"]
            assert isinstance(duration_us, int)
            seconds[reason] = seconds.get(reason, 0.0) + duration_us * 1e-6
    return seconds


def test_steps_and_the_spans_they_touched_link_to_each_other(spans: list[StoredSpan]) -> None:
    by_id = {(span["trace_id"], span["span_id"]): span for span in spans}
    kept = {span["trace_id"] for span in spans}
    steps = [span for span in spans if span["name"] == "engine.step"]
    for step in steps:
        assert step["links"] and step["parent_span_id"] == ""
        for link in step["links"]:
            if link["trace_id"] not in kept:
                continue  # it was held, and nobody wanted it
            touched = by_id[link["trace_id"], link["span_id"]]
            assert touched["name"] in ("queue", "prefill")
            assert {"trace_id": step["trace_id"], "span_id": step["span_id"]} in touched["links"]
    prefill = of_trace(spans, 1)["prefill"]
    computed = [by_id[link["trace_id"], link["span_id"]] for link in prefill["links"]]
    chunks = [e["attributes"] for e in prefill["events"] if e["name"] == "prefill_chunk"]
    assert [step["attributes"]["firsttoken.step_id"] for step in computed] == [
        chunk["firsttoken.step_id"] for chunk in chunks
    ]
    for step, chunk in zip(computed, chunks, strict=True):
        attributes = step["attributes"]
        traces = attributes["firsttoken.step.share.trace_ids"]
        tokens = attributes["firsttoken.step.share.tokens"]
        assert isinstance(traces, list) and isinstance(tokens, list)
        mine = [str(one) for one in traces].index(trace_id(1))
        assert tokens[mine] == chunk["firsttoken.chunk_tokens"]
        assert sum(map(int, tokens)) == attributes["firsttoken.step.tokens"]
        assert attributes["firsttoken.step.tokens"] == chunk["firsttoken.chunk_step_tokens"]


def test_a_cancelled_call_ends_its_spans(spans: list[StoredSpan]) -> None:
    trace = of_trace(spans, 3)
    assert trace[SERVER]["status"] == {"code": "ERROR", "message": "CANCELLED"}
    assert trace["decode"]["status"]["code"] == "ERROR"


def test_a_refused_call_has_its_status(spans: list[StoredSpan]) -> None:
    trace = of_trace(spans, 4)
    assert set(trace) == {SERVER}
    assert trace[SERVER]["status"] == {"code": "ERROR", "message": "INVALID_ARGUMENT"}
    assert trace[SERVER]["attributes"]["rpc.grpc.status_code"] == 3


def test_an_expired_call_says_so(spans: list[StoredSpan]) -> None:
    assert of_trace(spans, 8)[SERVER]["status"]["message"] == "DEADLINE_EXCEEDED"


def test_samples_have_their_own_stages(spans: list[StoredSpan]) -> None:
    decodes = [
        span for span in spans if span["trace_id"] == trace_id(7) and span["name"] == "decode"
    ]
    assert sorted(int(str(s["attributes"]["firsttoken.sample.index"])) for s in decodes) == [0, 1]


def test_nothing_is_kept_of_the_unsampled_and_no_time_runs_backwards(
    spans: list[StoredSpan],
) -> None:
    traced = {span["trace_id"] for span in spans if span["name"] != "engine.step"}
    traced -= {of_request(spans, request_id) for request_id in ("slow", "nonsense", *FAST)}
    assert traced == {trace_id(i) for i in (1, 2, 3, 4, 7, 8, 9)}
    assert all(span["start_unix_ns"] <= span["end_unix_ns"] for span in spans)
