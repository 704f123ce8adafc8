"""A real OTLP collector gets from facade and engine what the local store gets; one that dies, or
never answers, loses no request and changes no answer."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import MakeTinyModel
from tests.otlp_receiver import GrpcReceiver, Received, grpc_receiver, http_receiver
from tests.serving import Served, post, serve, stream
from traces import names
from traces.stored_spans import StoredSpan, read_spans

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DROPPED = "firsttoken_trace_spans_dropped_total"


@pytest.fixture(scope="module")
def receiver() -> Iterator[GrpcReceiver]:
    with grpc_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def exporting(
    tiny_model_dir: MakeTinyModel,
    tmp_path_factory: pytest.TempPathFactory,
    receiver: GrpcReceiver,
) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        endpoint = f"--otlp-traces-endpoint={receiver.endpoint}"
        with serve(tiny_model_dir("llama"), tmp_path_factory.mktemp("otlp"), endpoint) as running:
            yield running


def completion(served: Served, **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "ignore_eos": True}
    return {"model": served.model, "prompt": list(range(500, 560)), **sampling, **fields}


def dropped(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return sum(s.value for family in families for s in family.samples if s.name == DROPPED)


def in_store(served: Served) -> dict[str, StoredSpan]:
    return {span["span_id"]: span for span in read_spans(served.trace_dir)}


async def wait_exported(served: Served, received: Received, trace_ids: Iterable[str]) -> None:
    """Until both have each request's last spans, of both processes."""
    both: tuple[Callable[[], dict[str, StoredSpan]], ...]
    both = (lambda: in_store(served), received.spans)
    for trace_id in trace_ids:
        for found in both:
            deadline = time.monotonic() + 30
            while not {names.SPAN_DECODE, "POST"} <= {
                span["name"].split(" ")[0]
                for span in found().values()
                if span["trace_id"] == trace_id
            }:
                assert time.monotonic() < deadline, (trace_id, found())
                await asyncio.sleep(0.1)


async def all_kinds(served: Served) -> list[str]:
    """Streams, several samples, a grammar, one refused; returns their trace ids but the last."""
    trace_ids = [digit * 32 for digit in "123"]
    headers = [{"traceparent": f"00-{one}-{'a' * 16}-01"} for one in trace_ids]
    chat = {"model": served.model, "messages": [{"role": "user", "content": "Hi"}]}
    await stream(served.http, CHAT, {**chat, "max_tokens": 5}, headers[0])
    body = completion(served, n=2, max_tokens=3)
    assert (await post(served.http, COMPLETIONS, body, headers[1]))[0] == 200
    regex = {"structured_outputs": {"regex": "[ab]{4}"}, "max_tokens": 4, "ignore_eos": False}
    assert (await post(served.http, COMPLETIONS, completion(served, **regex), headers[2]))[0] == 200
    assert (await post(served.http, COMPLETIONS, {"model": "nobody", "prompt": "x"}))[0] == 404
    return trace_ids


async def check_same(served: Served, received: Received) -> None:
    await wait_exported(served, received, await all_kinds(served))
    await asyncio.sleep(1.5)  # the steps' spans, too
    deadline = time.monotonic() + 20
    while set(sent := received.spans()) != set(stored := in_store(served)):
        assert time.monotonic() < deadline, set(sent) ^ set(stored)
        await asyncio.sleep(0.3)
    for span_id, span in stored.items():
        assert sent[span_id] == span
    assert {span["service"] for span in sent.values()} == {"firsttoken-facade", "firsttoken-engine"}
    assert {"engine.step", "grammar_compile", "first_write"} <= {s["name"] for s in sent.values()}
    assert any(span["events"] for span in sent.values())
    assert any(span["links"] for span in sent.values())


async def test_a_collector_gets_what_the_store_gets(
    exporting: Served, receiver: GrpcReceiver
) -> None:
    await check_same(exporting, receiver.received)
    assert dropped(exporting.http) == dropped(exporting.metrics) == 0


async def test_killing_the_collector_loses_no_request_and_changes_no_answer(
    exporting: Served, receiver: GrpcReceiver
) -> None:
    body = completion(exporting, max_tokens=60)
    before = await stream(exporting.http, COMPLETIONS, body)

    async def kill() -> None:
        await asyncio.sleep(0.1)
        await asyncio.to_thread(receiver.kill)

    answers = await asyncio.gather(
        *(stream(exporting.http, COMPLETIONS, body) for _ in range(4)), kill()
    )
    answers += [await stream(exporting.http, COMPLETIONS, body) for _ in range(3)]
    for answer in filter(None, answers):
        assert (answer.status, answer.num_done) == (200, 1)
        assert answer.text() == before.text()
    deadline = time.monotonic() + 30
    while not (dropped(exporting.http) and dropped(exporting.metrics)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.3)
    spans = in_store(exporting).values()  # which goes on
    assert sum(span["name"] == f"POST {COMPLETIONS}" for span in spans) >= 8


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_over_http_and_one_that_never_answers(
    tiny_model_dir: MakeTinyModel, tmp_path: Path
) -> None:
    with http_receiver() as (endpoint, received):
        flag = f"--otlp-traces-endpoint={endpoint}"
        with serve(tiny_model_dir("llama"), tmp_path, flag) as served:
            await check_same(served, received)
            body = completion(served, max_tokens=60)
            before = await stream(served.http, COMPLETIONS, body)
            await asyncio.sleep(1.5)
            received.answers.clear()
            for _ in range(5):
                answer = await stream(served.http, COMPLETIONS, body)
                assert answer.text() == before.text()
            deadline = time.monotonic() + 20
            while not received.num_hanging:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            answer = await stream(served.http, COMPLETIONS, body)
            assert answer.text() == before.text()
            began = time.monotonic()
        assert time.monotonic() - began < 20  # it leaves, although nobody answers
