"""Planted troubles are named, and each time to first token is attributed: real processes."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeTinyModel
from tests.serving import Served, post, serve, stream
from tests.stored_requests import read_request
from tests.ttft_load import BLOCKS, FLAGS, GRAMMAR, MODEL, OTHERS, Planted, TtftLoad, explained
from traces import names
from traces.explain.explanation import explain
from traces.request_view import RequestView, events_of, number_of

MIN_ATTRIBUTED = 0.98


@pytest.fixture(scope="module")
def tiny_served(
    tiny_model_dir: MakeTinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serve(
        tiny_model_dir("llama", **MODEL), tmp_path_factory.mktemp("ttft"), *FLAGS
    ) as running:
        yield running


@pytest.fixture(scope="module")
def planted(tiny_served: Served) -> list[Planted]:
    """One of each kind but the slow grammar, whose compiler takes seconds to load."""
    load = TtftLoad(tiny_served)
    planted = asyncio.run(load.run(per_kind=1, num_plain=1, with_grammars=False))
    asyncio.run(wait_for_traces(tiny_served, [one.trace_id for one in planted]))
    return planted


async def wait_for_traces(served: Served, trace_ids: Iterable[str]) -> None:
    """Exports run once a second, of each process by itself."""
    deadline = time.monotonic() + 10
    for trace_id in trace_ids:
        while not is_whole(view := read_request(served.trace_dir, trace_id)):
            assert time.monotonic() < deadline, (trace_id, view)
            await asyncio.sleep(0.1)


def is_whole(view: RequestView | None) -> bool:
    if view is None or view.facade is None or view.call is None:
        return False
    return view.call.client is not None and names.SPAN_DECODE in view.call.stages


def check(served: Served, planted: list[Planted]) -> None:
    for one in planted:
        said = explained(served, one.trace_id)
        assert said["attributed_share"] >= MIN_ATTRIBUTED, (one, said["parts"])
        if one.cause:
            assert said["cause"] == one.cause, (one, said["causes"])


def test_each_planted_trouble_is_named_and_all_time_is_attributed(
    tiny_served: Served, planted: list[Planted]
) -> None:
    assert {one.cause for one in planted} == {OTHERS, BLOCKS, ""}
    check(tiny_served, planted)


def test_the_neighbour_is_who_had_the_steps(tiny_served: Served, planted: list[Planted]) -> None:
    (victim,) = (one for one in planted if one.cause == OTHERS)
    said = explained(tiny_served, victim.trace_id)
    first = said["neighbours"][0]
    assert first["prefill_tokens"] > 300
    assert first["request_id"] in said["sentence"]
    assert "--long-prefill-token-threshold" in said["advice"]
    neighbour = explained(tiny_served, first["trace_id"])
    assert neighbour["prefix"]["prompt_tokens"] == 1_500


def test_parts_lie_within_the_time_and_follow_one_another(
    tiny_served: Served, planted: list[Planted]
) -> None:
    for one in planted:
        said = explained(tiny_served, one.trace_id)
        parts: list[dict[str, Any]] = said["parts"]
        starts = [part["start_seconds"] for part in parts]
        assert starts == sorted(starts) and starts[0] >= 0
        assert max(part["end_seconds"] for part in parts) <= said["ttft_seconds"] + 1e-6
        assert sum(part["seconds"] for part in parts) <= said["ttft_seconds"] + 1e-4
        for part in parts:
            assert 0 <= part["seconds"] <= part["end_seconds"] - part["start_seconds"] + 1e-9


def test_many_are_ranked(tiny_served: Served, planted: list[Planted]) -> None:
    ranking = explained(tiny_served, "--since", "10m")
    assert ranking["num_requests"] >= len(planted)
    assert {cause["cause"] for cause in ranking["causes"]} >= {OTHERS, BLOCKS}
    assert ranking["ttft_seconds"]["p50"] <= ranking["ttft_seconds"]["p99"]
    slowest = explained(tiny_served, "--slowest", "2")
    times = [trace["ttft_seconds"] for trace in slowest["traces"]]
    assert len(times) == 2 and times == sorted(times, reverse=True)


def test_people_get_a_waterfall(tiny_served: Served, planted: list[Planted]) -> None:
    answer = command(tiny_served, planted[0].trace_id)
    assert answer.returncode == 0
    assert "of them attributed" in answer.stdout
    assert "What would have helped:" in answer.stdout
    assert "Who shared the steps" in answer.stdout
    many = command(tiny_served, "--slowest", "3")
    assert "p99" in many.stdout and planted[0].cause in many.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("0" * 31 + "1",), 1, "no request with trace or request id"),
        (("x y",), 2, "32 hexadecimal digits"),
        (("--since", "soon"), 2, "an age such as"),
        (("--slowest", "0"), 2, "at least 1"),
        (("0" * 32, "--since", "1m"), 2, "for many"),
    ],
)
def test_wrong_arguments_are_told(
    tiny_served: Served, arguments: tuple[str, ...], code: int, says: str
) -> None:
    answer = command(tiny_served, *arguments)
    assert answer.returncode == code
    assert says in answer.stderr


def command(served: Served, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "clients", "ttft", *arguments, f"--trace-dir={served.trace_dir}"]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)


async def test_an_answer_tells_its_timings(tiny_served: Served) -> None:
    body = {"model": tiny_served.model, "prompt": [7] * 50, "max_tokens": 3, "ignore_eos": True}
    path = "/v1/completions"
    status, answer, headers = await post(tiny_served.http, path, {**body, "timings": True})
    assert status == 200
    timings = answer["timings"]
    assert timings["prefill_ms"] > 0
    assert timings["prepare_ms"] <= timings["ttft_ms"] <= timings["total_ms"]
    assert {wait["reason"] for wait in timings["waits"]} >= {"running_step"}
    assert f"total;dur={timings['total_ms']:g}" in headers["Server-Timing"]
    assert "prefill;dur=" in headers["Server-Timing"]
    assert len(timings["trace_id"]) == 32


async def test_a_preemption_is_told(tiny_served: Served) -> None:
    """Two long answers, for which there are not enough blocks."""
    sent = [f"00-{digit * 32}-{digit * 16}-01" for digit in "de"]
    path, body = "/v1/completions", {"model": tiny_served.model, "ignore_eos": True}
    answers = await asyncio.gather(
        *(
            stream(
                tiny_served.http,
                path,
                {**body, "prompt": [100 + number] * 900, "max_tokens": 200},
                {"traceparent": traceparent},
            )
            for number, traceparent in enumerate(sent)
        )
    )
    assert [answer.status for answer in answers] == [200, 200]
    await wait_for_traces(tiny_served, ["d" * 32, "e" * 32])
    views = [read_request(tiny_served.trace_dir, digit * 32) for digit in "de"]
    calls = [view.call for view in views if view is not None and view.call is not None]
    prefills = [call.stages[names.SPAN_PREFILL] for call in calls]
    assert max(number_of(prefill, names.PREEMPTIONS) for prefill in prefills) >= 1
    again = [
        call
        for call in calls
        if events_of(call.stages[names.SPAN_DECODE], names.EVENT_PREFILL_CHUNK)
    ]
    assert again  # what it computed a second time is told with its decode
    for view in views:
        assert view is not None
        assert explain(view).attributed_share >= MIN_ATTRIBUTED


async def test_why_a_prefix_was_not_reused(tiny_served: Served) -> None:
    prompt = [30_000 + position for position in range(300)]
    other = [20_000 + position for position in range(2_000)]  # takes all blocks
    traces: list[str] = []

    async def ask(token_ids: list[int], **fields: str) -> None:
        traces.append(secrets.token_hex(16))
        body = {"model": tiny_served.model, "prompt": token_ids, "max_tokens": 2, **fields}
        headers = {"traceparent": f"00-{traces[-1]}-{'1' * 16}-01"}
        await stream(tiny_served.http, "/v1/completions", body, headers)

    await ask(prompt, cache_salt="one")
    await ask(prompt, cache_salt="one")
    await ask(prompt, cache_salt="two")
    await ask(other)
    await ask(prompt, cache_salt="one")
    await wait_for_traces(tiny_served, traces)
    first, again, salted, _, evicted = (explained(tiny_served, one)["prefix"] for one in traces)
    assert (first["cached_tokens"], first["missed"]) == (0, None)
    assert (again["cached_tokens"], again["missed"]) == (299, None)
    assert (salted["missed"], salted["missed_tokens"]) == ("salt", 256)
    assert (evicted["missed"], evicted["missed_tokens"]) == ("evicted", 256)


@pytest.mark.slow
def test_forty_requests_with_three_kinds_of_trouble(
    tiny_model_dir: MakeTinyModel, tmp_path: Path
) -> None:
    with serve(tiny_model_dir("llama", **MODEL), tmp_path, *FLAGS) as served:
        planted = asyncio.run(TtftLoad(served).run(per_kind=12, num_plain=4))
        asyncio.run(wait_for_traces(served, [one.trace_id for one in planted]))
        assert Counter(one.cause for one in planted) == {OTHERS: 12, BLOCKS: 12, GRAMMAR: 12, "": 4}
        check(served, planted)
