"""Generations through real sockets: events in order, for one caller and for many."""

from __future__ import annotations

import asyncio

import pytest

from clients import (
    Accepted,
    ClientOptions,
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    InternalError,
    InvalidRequest,
    PrefillProgress,
    StoppingCriteria,
    Usage,
)
from clients.testing import Accept, Emit, Finish, Hang, Outcome, Pause, Script
from tests.client_pair import all_events, connected, prompt


async def test_events_come_in_order_and_usage_adds_up() -> None:
    async with connected() as (fake, client):
        fake.script(
            Script.of_tokens((7, 8, 9), chunk_sizes=(1, 2), stop_token_id=2, cached_tokens=1)
        )
        stream = client.generate(prompt("mine"))
        assert (stream.accepted, stream.usage) == (None, None)
        accepted, progress, *deltas, finished = await all_events(stream)
        assert accepted == stream.accepted == Accepted("mine", 3, 2045)
        assert progress == PrefillProgress(0, 3, 3, 1)
        assert deltas == [Delta(0, (7,)), Delta(0, (8, 9)), Delta(0, (2,))]
        assert isinstance(finished, Finished)
        assert (finished.reason, finished.stop_token_id) == (FinishReason.STOP, 2)
        assert finished.usage == stream.usage == Usage(3, 1, 4)
        assert fake.requests == [prompt("mine")]
        assert fake.calls[0].outcome is Outcome.FINISHED
        assert fake.calls[0].timeout_seconds is None


@pytest.mark.parametrize("pause", [(), (Pause(0.05),)])
async def test_last_tokens_just_before_the_end_are_not_lost(pause: tuple[Pause, ...]) -> None:
    """CASES S5: the last ids right before Finished, and well before it."""
    async with connected() as (fake, client):
        fake.script(Script((Accept(), Emit((1,)), *pause, Emit((2, 3)), *pause, Finish())))
        for _ in range(50 if not pause else 3):
            events = await all_events(client.generate(prompt()))
            token_ids = [t for event in events if isinstance(event, Delta) for t in event.token_ids]
            assert token_ids == [1, 2, 3]
            assert isinstance(events[-1], Finished)


async def test_a_slow_reader_gets_everything_that_was_sent_before_the_end() -> None:
    """The whole stream and its status are here before the first event is read."""
    async with connected() as (fake, client):
        fake.script(Script.of_tokens(range(200)))
        stream = client.generate(prompt())
        await stream.wait_accepted()
        await fake.calls[0].wait_closed()
        await asyncio.sleep(0.1)
        events = await all_events(stream)
        assert sum(isinstance(event, Delta) for event in events) == 200
        assert isinstance(events[-1], Finished)


async def test_samples_are_told_apart() -> None:
    async with connected() as (fake, client):
        fake.script(Script.of_samples(((1, 2), (), (5, 6, 7)), reason=FinishReason.LENGTH))
        events = await all_events(client.generate(prompt(n=3)))
        for index, token_ids in enumerate(([1, 2], [], [5, 6, 7])):
            mine = [e for e in events if not isinstance(e, Accepted) and e.index == index]
            assert [t for e in mine if isinstance(e, Delta) for t in e.token_ids] == token_ids
            assert [type(e) for e in mine].count(Finished) == 1
            assert isinstance(mine[-1], Finished)


async def test_log_probabilities_come_when_asked_for() -> None:
    async with connected() as (_, client):
        events = await all_events(client.generate(GenerateRequest(prompt="a b", num_logprobs=2)))
        for delta in (event for event in events if isinstance(event, Delta)):
            assert [len(entry.top) for entry in delta.logprobs] == [2] * len(delta.token_ids)
        events = await all_events(client.generate(GenerateRequest(prompt="a b")))
        assert all(event.logprobs == () for event in events if isinstance(event, Delta))


async def test_waiting_for_acceptance_loses_no_event() -> None:
    async with connected() as (_, client), client.generate(prompt()) as stream:
        accepted = await stream.wait_accepted()
        assert await stream.wait_accepted() is accepted
        events = [event async for event in stream]
        assert events[0] is accepted
        assert isinstance(events[-1], Finished)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_an_id_is_made_up_where_there_is_none() -> None:
    async with connected() as (fake, client):
        streams = [client.generate(prompt()) for _ in range(2)]
        for stream in streams:
            await all_events(stream)
        first, second = (request.request_id for request in fake.requests)
        assert first.startswith("client-")
        assert first != second
        assert [stream.request_id for stream in streams] == [first, second]


async def test_metadata_carries_the_id_and_the_deadline_travels() -> None:
    async with connected() as (fake, client):
        await all_events(client.generate(prompt("mine"), timeout=60.0))
        assert fake.calls[0].metadata["x-request-id"] == "mine"
        assert fake.calls[0].timeout_seconds == pytest.approx(60.0, abs=10.0)


async def test_a_hundred_streams_at_once_do_not_mix() -> None:
    def script(request: GenerateRequest) -> Script:
        assert not isinstance(request.prompt, str)
        start = request.prompt[0]
        return Script.of_tokens(range(start, start + 20), chunk_sizes=3, delay_seconds=0.005)

    async with connected() as (fake, client):
        fake.script(script)

        async def run(number: int) -> None:
            request = GenerateRequest(prompt=(number * 1000,), request_id=f"stream-{number}")
            events = await all_events(client.generate(request))
            assert isinstance(events[0], Accepted)
            assert events[0].request_id == f"stream-{number}"
            token_ids = [t for e in events if isinstance(e, Delta) for t in e.token_ids]
            assert token_ids == list(range(number * 1000, number * 1000 + 20))

        async with asyncio.TaskGroup() as group:
            for number in range(100):
                group.create_task(run(number))
        assert fake.num_open_calls == 0


async def test_a_stream_without_its_end_is_an_error() -> None:
    async with connected() as (fake, client):
        fake.script(Script((Accept(), Emit((1,)))))
        with pytest.raises(InternalError, match="before the generation was finished") as failure:
            await all_events(client.generate(prompt("torn")))
        assert failure.value.usage == Usage(3, 0, 1)
        assert failure.value.request_id == "torn"


async def test_a_request_too_large_for_a_message_is_refused_here() -> None:
    async with connected(ClientOptions(max_message_bytes=1000)) as (fake, client):
        with pytest.raises(InvalidRequest, match="1000"):
            await all_events(client.generate(GenerateRequest(prompt="x" * 1000)))
        assert not fake.calls
        await all_events(client.generate(prompt()))


async def test_two_readers_of_one_stream_are_refused() -> None:
    async with connected() as (fake, client), client.generate(prompt()) as stream:
        fake.script(Script((Accept(), Hang(), Finish())))
        await stream.wait_accepted()
        await anext(stream)
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match="another task"):
            await anext(stream)
        await client.abort(stream.request_id)
        assert isinstance(await reading, Finished)


async def test_the_default_script_obeys_the_limit() -> None:
    async with connected() as (_, client):
        request = GenerateRequest(prompt=(1,), stopping=StoppingCriteria(max_tokens=2))
        events = await all_events(client.generate(request))
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert (finished.reason, finished.usage.completion_tokens) == (FinishReason.LENGTH, 2)
