"""The main job on the real model: answered, batched, chunked, traced."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time

from tests.serving import Served, load, post, stream, wait_idle
from traces.stored_spans import StoredSpan, read_spans

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def chat(served: Served, **fields: object) -> dict[str, object]:
    return {"model": served.model, "messages": CAPITAL, "temperature": 0, **fields}


def completion(served: Served, prompt: object, **fields: object) -> dict[str, object]:
    return {"model": served.model, "prompt": prompt, "temperature": 0, **fields}


async def test_the_capital_of_france_streamed(served: Served) -> None:
    answer = await stream(served.http, "/v1/chat/completions", chat(served, max_tokens=32))
    assert answer.status == 200
    assert "Paris" in answer.text()
    assert answer.num_done == 1
    assert answer.raw.endswith(b"data: [DONE]\n\n")
    status, body, _ = await post(served.http, "/v1/chat/completions", chat(served, max_tokens=32))
    assert status == 200
    assert body["choices"][0]["message"]["content"] == answer.text()


async def test_sixteen_streams_share_steps(served: Served) -> None:
    before = await wait_idle(served, 30)
    answers = await asyncio.gather(
        *(
            stream(
                served.http,
                "/v1/completions",
                completion(
                    served,
                    f"Story number {number}:",
                    max_tokens=64,
                    ignore_eos=True,
                    stream_options={"include_usage": True},
                ),
            )
            for number in range(16)
        )
    )
    after = await load(served)
    tokens = sum((answer.usage() or {})["completion_tokens"] for answer in answers)
    assert tokens == 16 * 64
    assert after.num_steps - before.num_steps <= tokens / 8


async def test_a_late_request_gets_its_first_token_while_others_run(served: Served) -> None:
    running = [
        asyncio.create_task(
            stream(
                served.http,
                "/v1/completions",
                completion(served, f"Tale {number}:", max_tokens=400, ignore_eos=True),
            )
        )
        for number in range(4)
    ]
    await asyncio.sleep(1.0)
    late = await stream(
        served.http, "/v1/completions", completion(served, "The sea is", max_tokens=4)
    )
    early = await asyncio.gather(*running)
    assert late.delta_times()[0] < min(answer.delta_times()[-1] for answer in early)


async def test_a_long_prompt_stalls_no_running_stream(served: Served) -> None:
    running = [
        asyncio.create_task(
            stream(
                served.http,
                "/v1/completions",
                completion(served, f"Chapter {number}.", max_tokens=800, ignore_eos=True),
            )
        )
        for number in range(2)
    ]
    await asyncio.sleep(1.0)
    prompt = [1000 + number % 20_000 for number in range(4_000)]
    began = time.monotonic()
    long = await stream(served.http, "/v1/completions", completion(served, prompt, max_tokens=2))
    assert long.status == 200 and len(long.deltas()) >= 1
    first_long = long.delta_times()[0]
    for answer in await asyncio.gather(*running):
        times = answer.delta_times()
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        # Computed at once it would be one gap. (On a busy machine steps take longer.)
        assert max(gaps) < max(2.0, 0.5 * (first_long - began))
        assert times[0] < first_long  # the test is vacuous otherwise
    spans = await spans_when(served, "prefill", long.headers["x-request-id"])
    chunks = spans[0]["events"]
    assert len(chunks) > 4


async def test_one_trace_spans_facade_and_engine(served: Served) -> None:
    trace_id, parent = secrets.token_hex(16), secrets.token_hex(8)
    status, _, headers = await post(
        served.http,
        "/v1/chat/completions",
        chat(served, max_tokens=4),
        {"traceparent": f"00-{trace_id}-{parent}-01"},
    )
    assert status == 200
    wanted = {"queue", "prefill", "decode", "render", "tokenize"}
    deadline = time.monotonic() + 30
    while True:
        spans = list(read_spans(served.trace_dir, trace_id))
        servers = [span["service"] for span in spans if span["kind"] == "SERVER"]
        if len(servers) == 2 and wanted <= {span["name"] for span in spans}:
            break
        assert time.monotonic() < deadline, [span["name"] for span in spans]
        await asyncio.sleep(0.2)
    check_tree(spans, parent)
    assert headers["x-request-id"]


def check_tree(spans: list[StoredSpan], parent: str) -> None:
    """SERVER under the caller, CLIENT under it, SERVER under that, the engine's parts last."""
    by_id = {span["span_id"]: span for span in spans}
    (root,) = [span for span in spans if span["parent_span_id"] == parent]
    assert (root["service"], root["kind"]) == ("firsttoken-facade", "SERVER")
    (rpc,) = [s for s in spans if s["service"] == "firsttoken-engine" and s["kind"] == "SERVER"]
    client = by_id[rpc["parent_span_id"]]
    assert (client["service"], client["kind"]) == ("firsttoken-facade", "CLIENT")
    assert client["parent_span_id"] == root["span_id"]
    for span in spans:
        assert span["end_unix_ns"] >= span["start_unix_ns"]
        assert span["parent_span_id"] in by_id or span is root
        if span["name"] in ("queue", "prefill", "decode"):
            assert span["parent_span_id"] == rpc["span_id"]


async def spans_when(served: Served, name: str, request_id: str) -> list[StoredSpan]:
    """Spans of that name in the trace of that HTTP request, once they are stored."""
    deadline = time.monotonic() + 30
    while True:
        everything = list(read_spans(served.trace_dir))
        traces = {
            span["trace_id"]
            for span in everything
            if span["attributes"].get("firsttoken.request.id") == request_id
        }
        found = [s for s in everything if s["trace_id"] in traces and s["name"] == name]
        if found:
            return found
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
