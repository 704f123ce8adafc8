"""One trace over a facade and whichever of two engines served it, rerouted calls included."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from clients import EngineClient, GenerateRequest, StoppingCriteria
from tests.conftest import MakeTinyModel
from tests.faults.test_routing_engines import prompt_of, two_engines
from tests.running_engine import Engine
from tests.serving import stream
from tests.stored_requests import read_request
from traces import names
from traces.explain.explanation import explain
from traces.request_view import RequestView, events_of, number_of
from traces.stored_spans import StoredSpan, read_spans

pytestmark = pytest.mark.slow

NUM_REQUESTS = 6
SLOW = {"num_hidden_layers": 64}  # what is to fill an engine runs for seconds, on any machine


@contextlib.contextmanager
def facade_process(engines: Sequence[Engine], trace_dir: Path) -> Iterator[str]:
    """Its URL."""
    command = [sys.executable, "-m", "http_facade", "--port=0", f"--trace-dir={trace_dir}"]
    command += ["--routing-policy=round-robin", *(f"--engine={e.grpc}" for e in engines)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["http"]
        finally:
            process.terminate()


async def ask(url: str, model: str, number: int) -> str:
    """The trace id. Asks again while the facade has not met its engines."""
    trace_id = secrets.token_hex(16)
    body = {"model": model, "prompt": prompt_of(number), "max_tokens": 4, "ignore_eos": True}
    deadline = time.monotonic() + 30
    while True:
        headers = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
        answer = await stream(url, "/v1/completions", body, headers)
        if answer.status == 200:
            return trace_id
        assert answer.status == 503, answer.raw
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
        trace_id = secrets.token_hex(16)


async def whole_view(trace_dir: Path, trace_id: str) -> RequestView:
    """Exports run once a second, of each process by itself."""
    deadline = time.monotonic() + 30
    while (view := read_request(trace_dir, trace_id)) is None or not _is_whole(view):
        assert time.monotonic() < deadline, view
        await asyncio.sleep(0.1)
    return view


def _is_whole(view: RequestView) -> bool:
    call = view.call
    return (
        view.facade is not None
        and call is not None
        and call.client is not None
        and names.SPAN_DECODE in call.stages
    )


def port_of(engine: Engine) -> int:
    return int(engine.grpc.rpartition(":")[2])


def client_ports(trace_dir: Path, trace_id: str) -> list[int]:
    """Of the engines that were tried, in order."""
    calls: list[StoredSpan] = [
        span
        for span in read_spans(trace_dir, trace_id)
        if span["kind"] == "CLIENT" and span["attributes"].get(names.RPC_METHOD) == "Generate"
    ]
    calls.sort(key=lambda span: span["start_unix_ns"])
    return [number_of(span, names.SERVER_PORT) for span in calls]


async def test_each_trace_names_the_engine_that_served_it(
    tiny_model_dir: MakeTinyModel, tmp_path: Path
) -> None:
    trace_dir = tmp_path / "traces"
    flags = (f"--trace-dir={trace_dir}", "--max-num-seqs=1", "--max-num-queued-reqs=1")
    with (
        two_engines(tiny_model_dir("llama", **SLOW), tmp_path, *flags) as engines,
        facade_process(engines, trace_dir) as url,
    ):
        model = engines[0].model
        trace_ids = [await ask(url, model, number) for number in range(NUM_REQUESTS)]
        served_by = []
        for trace_id in trace_ids:
            view = await whole_view(trace_dir, trace_id)
            assert view.call is not None
            (port,) = client_ports(trace_dir, trace_id)
            served_by.append(port)
            assert explain(view).attributed_share >= 0.98
        assert set(served_by) == {port_of(engine) for engine in engines}

        # Full: one runs there and one waits. A call that comes to it goes to the other.
        full, free = map(port_of, engines)
        async with EngineClient(engines[0].grpc) as client:
            long = GenerateRequest(
                [7, 8, 9], stopping=StoppingCriteria(max_tokens=1500, ignore_eos=True)
            )
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(2):
                    running = await stack.enter_async_context(client.generate(long))
                    await running.wait_accepted()
                rerouted = [await ask(url, model, 100 + number) for number in range(2)]
        tried = {trace_id: client_ports(trace_dir, trace_id) for trace_id in rerouted}
        for trace_id in rerouted:
            view = await whole_view(trace_dir, trace_id)
            tried[trace_id] = client_ports(trace_dir, trace_id)
            assert tried[trace_id][-1] == free
            assert view.facade is not None
            events = events_of(view.facade, names.EVENT_REROUTED)
            assert [number_of(e, names.SERVER_PORT) for e in events] == tried[trace_id][:-1]
        assert [full, free] in tried.values()
