"""Spans of the engine service: under the caller's, ended whatever happens, none when unsampled."""

from __future__ import annotations

import asyncio

import pytest

from protos import engine_pb2 as pb
from tests.conftest import MakeTinyModel
from tests.running_engine import Client, client, engine_process, request
from traces.file_store import StoredSpan, read_spans

PARENT = "00f067aa0ba902b7"


def trace_id(number: int) -> str:
    return f"{number:032x}"


async def generate(
    engine_client: Client,
    message: pb.GenerateRequest,
    traceparent: str,
    *,
    cancel: bool = False,
    timeout: float | None = None,
) -> None:
    metadata = (("traceparent", traceparent),)
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
    flags = (f"--trace-dir={work_dir}", "--trace-sample-ratio=0", "--max-num-batched-tokens=64")

    async def calls(address: str) -> None:
        async with client(address) as engine_client:
            chunked = request(prompt=list(range(500, 600)), max_tokens=4)
            grammar = request(prompt="x", max_tokens=8)
            grammar.structured_output.json_object = True
            invalid = request()
            invalid.sampling.temperature = 9
            await asyncio.gather(
                generate(engine_client, chunked, sampled(1)),
                generate(engine_client, grammar, sampled(2)),
                generate(engine_client, request(max_tokens=1_500), sampled(3), cancel=True),
                generate(engine_client, invalid, sampled(4)),
                generate(engine_client, request(), f"00-{trace_id(5)}-{PARENT}-00"),
                generate(engine_client, request(), "nonsense"),
                generate(engine_client, request(n=2, max_tokens=3), sampled(7)),
            )
            await generate(engine_client, request(max_tokens=1_500), sampled(8), timeout=0.3)
            await engine_client.wait_idle(5)

    with engine_process(tiny_model_dir("llama"), work_dir, *flags) as engine:
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
    assert set(trace) == {SERVER, "queue", "prefill", "decode"}
    server = trace[SERVER]
    for name in ("queue", "prefill", "decode"):
        assert trace[name]["parent_span_id"] == server["span_id"]
    assert trace["queue"]["start_unix_ns"] == server["start_unix_ns"]
    assert trace["queue"]["end_unix_ns"] == trace["prefill"]["start_unix_ns"]
    assert trace["prefill"]["end_unix_ns"] == trace["decode"]["start_unix_ns"]
    assert trace["decode"]["end_unix_ns"] <= server["end_unix_ns"]
    events = trace["prefill"]["events"]
    assert [event["name"] for event in events] == ["prefill_chunk"] * 2 + ["first_token"]
    assert sum(int(str(e["attributes"].get("firsttoken.chunk_tokens", 0))) for e in events) == 100


def test_a_grammar_has_its_own_stage(spans: list[StoredSpan]) -> None:
    trace = of_trace(spans, 2)
    assert trace["grammar_compile"]["end_unix_ns"] == trace["queue"]["start_unix_ns"]


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
    assert {span["trace_id"] for span in spans} == {trace_id(i) for i in (1, 2, 3, 4, 7, 8)}
    assert all(span["start_unix_ns"] <= span["end_unix_ns"] for span in spans)
