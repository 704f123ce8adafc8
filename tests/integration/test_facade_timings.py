"""The field `timings` and the header Server-Timing, in front of a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.facade_harness import CHAT, COMPLETIONS, Harness, body_for, facade_and_fake

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATHS = [CHAT, COMPLETIONS]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def facade(embedded_model_dir: Path) -> AsyncIterator[Harness]:
    async with facade_and_fake(embedded_model_dir) as harness:
        yield harness


def check(timings: dict[str, Any]) -> None:
    assert 0 < timings["prepare_ms"] <= timings["ttft_ms"] <= timings["total_ms"]
    assert timings["prefill_ms"] <= timings["engine_first_token_ms"] <= timings["ttft_ms"]
    assert (timings["queue_ms"], timings["grammar_wait_ms"]) == (0, 0)
    assert timings["prefill_chunks"] == 1
    assert timings["trace_id"] is None  # nothing is traced here


@pytest.mark.parametrize("path", PATHS)
async def test_a_whole_answer_tells_its_timings_when_asked(facade: Harness, path: str) -> None:
    facade.say("Some words", delay_seconds=0.02)
    _, plain, headers = await facade.post(path, body_for(path))
    assert "timings" not in plain
    metrics = dict(entry.split(";dur=") for entry in headers["Server-Timing"].split(", "))
    assert metrics.keys() == {"prepare", "queue", "grammar", "prefill", "ttft", "total"}
    assert float(metrics["prefill"]) >= 20
    _, answer, headers = await facade.post(path, body_for(path, timings=True))
    check(answer["timings"])
    assert f"total;dur={answer['timings']['total_ms']:g}" in headers["Server-Timing"]
    assert answer["choices"] == plain["choices"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream_tells_them_in_its_last_chunk(
    facade: Harness, path: str, usage: bool
) -> None:
    facade.say("Some words")
    options = {"stream_options": {"include_usage": True}} if usage else {}
    plain = await facade.stream(path, body_for(path, **options))
    assert not any("timings" in event for event in plain.events)
    answer = await facade.stream(path, body_for(path, timings=True, **options))
    *others, last = answer.events
    assert last["choices"] == []
    check(last["timings"])
    assert bool(last.get("usage")) is usage
    assert not any("timings" in event for event in others)
    assert answer.text() == plain.text() and answer.num_done == 1


async def test_a_stop_string_or_several_choices_take_nothing_away(facade: Harness) -> None:
    facade.say("Some words and more")
    _, answer, _ = await facade.post(CHAT, body_for(CHAT, timings=True, stop="and"))
    assert answer["choices"][0]["finish_reason"] == "stop"
    check(answer["timings"])


async def test_who_does_not_ask_does_not_make_the_engine_tell(facade: Harness) -> None:
    facade.say("Some words")
    facade.reset()
    await facade.stream(CHAT, body_for(CHAT))
    await facade.stream(CHAT, body_for(CHAT, timings=True))
    await facade.post(CHAT, body_for(CHAT))  # for the header
    assert [call.request.tells_timing for call in facade.fake.calls] == [False, True, True]


@pytest.mark.parametrize("value", ["yes", 1])
async def test_it_is_a_boolean(facade: Harness, value: object) -> None:
    status, body, _ = await facade.post(CHAT, body_for(CHAT, timings=value))
    assert status == 400 and body["error"]["param"] == "timings"
