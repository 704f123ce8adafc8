"""Delivery that never waits, in order, and bounded."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from engine_service.collector import Collector
from engine_service.errors import EngineUnavailable, InternalError
from engine_service.messages import (
    Finish,
    FinishReason,
    RequestOutput,
    RequestTiming,
    TokenLogprobs,
)

FINISH = Finish(FinishReason.LENGTH, RequestTiming(arrival_ns=1))


def output(index: int = 0, *token_ids: int, finish: Finish | None = None) -> RequestOutput:
    return RequestOutput("r", index, new_token_ids=list(token_ids), finish=finish)


async def test_the_first_output_wakes_an_idle_reader() -> None:
    collector = Collector()
    reader = asyncio.create_task(collector.take())
    await asyncio.sleep(0)
    assert not reader.done()
    collector.put(output(0, 7))
    (events,) = await asyncio.wait_for(reader, 1)
    assert events.token_ids == [7]


async def test_outputs_merge_per_sample_while_the_reader_is_busy() -> None:
    collector = Collector()
    logprobs = TokenLogprobs(-0.5, 1, [5], [-0.5])
    collector.put(RequestOutput("r", 1, num_prefilled_tokens=16, num_cached_tokens=16))
    collector.put(output(0, 5))
    collector.put(
        RequestOutput("r", 1, [9], [logprobs], num_prefilled_tokens=20, num_cached_tokens=16)
    )
    collector.put(output(1, 8))
    collector.put(output(0, 6, finish=FINISH))
    first, second = await collector.take()
    assert (first.index, first.num_prefilled_tokens, first.num_cached_tokens) == (1, 20, 16)
    assert (first.token_ids, first.logprobs, first.finish) == ([9, 8], [logprobs], None)
    assert (second.index, second.token_ids, second.finish) == (0, [5, 6], FINISH)


async def test_no_prompt_logprob_is_lost_while_progress_keeps_its_latest_value() -> None:
    collector = Collector()
    told = [TokenLogprobs(-0.5 * i, 1, [], []) for i in range(3)]
    for num_prefilled, part in ((2, told[:2]), (4, told[2:])):
        progress = RequestOutput("r", 0, num_prefilled_tokens=num_prefilled)
        collector.put(msgspec.structs.replace(progress, new_prompt_logprobs=part))
    (events,) = await collector.take()
    assert (events.num_prefilled_tokens, events.prompt_logprobs) == (4, told)


async def test_a_slot_is_emptied_by_taking_it() -> None:
    collector = Collector()
    collector.put(output(0, 1))
    await collector.take()
    reader = asyncio.create_task(collector.take())
    await asyncio.sleep(0)
    assert not reader.done()
    collector.put(output(0, 2))
    assert [events.token_ids for events in await reader] == [[2]]


async def test_a_failure_comes_after_what_was_made_before_it_and_stays() -> None:
    collector = Collector()
    collector.put(output(0, 1))
    collector.fail(EngineUnavailable("died"))
    collector.fail(InternalError("later"))
    assert [events.token_ids for events in await collector.take()] == [[1]]
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="died"):
            await collector.take()


async def test_a_failure_wakes_an_idle_reader() -> None:
    collector = Collector()
    reader = asyncio.create_task(collector.take())
    await asyncio.sleep(0)
    collector.fail(EngineUnavailable("died"))
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(reader, 1)


async def test_a_cancelled_reader_loses_nothing() -> None:
    collector = Collector()
    reader = asyncio.create_task(collector.take())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    collector.put(output(0, 3))
    assert [events.token_ids for events in await collector.take()] == [[3]]
