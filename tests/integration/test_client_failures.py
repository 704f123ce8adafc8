"""Typed errors for every reason, retries before acceptance and never after it, deadlines."""

from __future__ import annotations

import asyncio
import socket
import time

import grpc
import pytest

from clients import (
    CallCancelled,
    ClientOptions,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineClient,
    EngineClientError,
    EngineUnavailable,
    FieldViolation,
    Finished,
    GenerateRequest,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    OutOfMemory,
    PermissionDenied,
    QueueFull,
    RateLimited,
    RequestIdInUse,
    SlowReader,
    TokenizerStale,
    Unauthenticated,
    Usage,
)
from clients.status import ERRORS_BY_REASON, error_from_rpc
from clients.testing import Accept, Emit, Fail, Finish, Hang, Outcome, Script
from protos import engine_pb2
from tests.client_pair import QUICK, all_events, connected, prompt

ONE_ATTEMPT = ClientOptions(max_attempts=1)

EVERY_ERROR = [
    InvalidRequest(
        "bad", field_violations=(FieldViolation("sampling.top_p", "must be in (0, 1]"),)
    ),
    ContextLengthExceeded("9 tokens do not fit in 8"),
    ModelNotFound("no such model"),
    QueueFull("full", retry_after_seconds=1.5),
    RateLimited("enough for this minute", retry_after_seconds=0.75),
    SlowReader("too slow"),
    OutOfMemory("no memory"),
    RequestIdInUse("in use"),
    TokenizerStale("stale"),
    EngineUnavailable("restarting", retry_after_seconds=0.25),
    DeadlineExceeded("too late"),
    Unauthenticated("who are you"),
    PermissionDenied("not for you"),
    InternalError("a fault"),
]


def test_the_table_has_every_reason_of_the_wire() -> None:
    reasons = set(engine_pb2.ErrorReason.keys()) - {"ERROR_REASON_UNSPECIFIED"}
    assert set(ERRORS_BY_REASON) == reasons
    assert {type(error) for error in EVERY_ERROR} == {kind for kind, _ in ERRORS_BY_REASON.values()}


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
async def test_every_reason_has_its_type(error: EngineClientError) -> None:
    """Refused, failed right after Accepted, failed in mid-stream."""
    async with connected(ONE_ATTEMPT) as (fake, client):
        fake.script(
            Script.failing(error),
            Script((Accept(), Fail(error))),
            Script((Accept(), Emit((1, 2)), Emit((3,), index=1), Fail(error))),
        )
        for usage in (None, Usage(3, 0, 0), Usage(3, 0, 3)):
            with pytest.raises(type(error)) as failure:
                await all_events(client.generate(prompt("mine", n=2)))
            raised = failure.value
            assert type(raised) is type(error)
            assert raised.message == str(raised) == error.message
            assert ERRORS_BY_REASON[raised.reason][0] is type(error)
            assert raised.request_id == "mine"
            assert raised.retry_after_seconds == error.retry_after_seconds
            assert raised.field_violations == error.field_violations
            assert raised.usage == usage
        assert [call.outcome for call in fake.calls] == [Outcome.FAILED] * 3


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
async def test_a_bare_code_is_understood(error: EngineClientError) -> None:
    """As from a proxy. A code that stands for several reasons says nothing without details."""
    shares_code = isinstance(error, QueueFull | SlowReader | OutOfMemory)
    bare = InternalError if shares_code else type(error)
    async with connected(ONE_ATTEMPT) as (fake, client):
        fake.script(Script.failing(error, with_details=False))
        with pytest.raises(EngineClientError) as failure:
            await all_events(client.generate(prompt()))
        assert type(failure.value) is bare
        assert failure.value.reason == ""
        assert failure.value.retry_after_seconds is None


@pytest.mark.parametrize("details", [b"\xff\xff\xff", b""])
def test_broken_details_leave_the_code(details: bytes) -> None:
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", details))
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), metadata, "gone", ""
    )
    assert type(error_from_rpc(error)) is ModelNotFound


def test_a_bare_exhaustion_is_no_full_queue() -> None:
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        "received metadata size exceeds hard limit",
        "",
    )
    assert type(error_from_rpc(error)) is InternalError


def test_an_unknown_code_is_an_internal_error() -> None:
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNIMPLEMENTED, grpc.aio.Metadata(), grpc.aio.Metadata(), "no such call", ""
    )
    assert type(error_from_rpc(error)) is InternalError


async def test_the_door_refuses_as_the_engine_does() -> None:
    async with connected() as (fake, client):
        for request, kind in (
            (GenerateRequest(prompt=(1,), model="other"), ModelNotFound),
            (GenerateRequest(prompt=(1,), tokenizer_digest="old"), TokenizerStale),
            (GenerateRequest(prompt=tuple(range(2048))), ContextLengthExceeded),
        ):
            with pytest.raises(kind):
                await all_events(client.generate(request))
        fake.script(Script((Accept(), Hang())))
        async with client.generate(prompt("mine")) as stream:
            await stream.wait_accepted()
            with pytest.raises(RequestIdInUse):
                await all_events(client.generate(prompt("mine")))


# ---------------------------------------------------------------- retries


@pytest.mark.parametrize(
    ("error", "least_seconds"),
    [
        (EngineUnavailable("restarting"), 0.01),  # half the back-off
        (EngineUnavailable("restarting", retry_after_seconds=0.15), 0.15),
        (QueueFull("full", retry_after_seconds=0.15), 0.15),
    ],
)
async def test_a_refusal_is_retried(error: EngineClientError, least_seconds: float) -> None:
    async with connected() as (fake, client):
        fake.script(Script.failing(error), Script.of_tokens((1, 2)))
        start = time.monotonic()
        stream = client.generate(prompt("mine"))
        events = await all_events(stream)
        assert time.monotonic() - start >= least_seconds
        assert isinstance(events[-1], Finished)
        assert [request.request_id for request in fake.requests] == ["mine", "mine-r2"]
        assert [call.metadata["x-request-id"] for call in fake.calls] == ["mine", "mine"]
        assert stream.request_id == "mine-r2"


async def test_attempts_are_bounded() -> None:
    async with connected() as (fake, client):
        fake.script(Script.failing(EngineUnavailable("down")))
        with pytest.raises(EngineUnavailable) as failure:
            await all_events(client.generate(prompt("mine")))
        assert len(fake.calls) == 3
        assert failure.value.request_id == "mine-r3"


@pytest.mark.parametrize(
    "error", [QueueFull("full"), RequestIdInUse("in use"), InternalError("a fault")]
)
async def test_other_refusals_are_final(error: EngineClientError) -> None:
    async with connected() as (fake, client):
        fake.script(Script.failing(error), Script.of_tokens((1,)))
        with pytest.raises(type(error)):
            await all_events(client.generate(prompt()))
        assert len(fake.calls) == 1


@pytest.mark.parametrize("steps", [(Accept(),), (Accept(), Emit((1,)))])
async def test_nothing_is_retried_after_acceptance(steps: tuple[Accept | Emit, ...]) -> None:
    async with connected() as (fake, client):
        failure = Fail(EngineUnavailable("died", retry_after_seconds=0.01))
        fake.script(Script((*steps, failure)), Script.of_tokens((1,)))
        with pytest.raises(EngineUnavailable):
            await all_events(client.generate(prompt()))
        await asyncio.sleep(0.1)
        assert len(fake.calls) == 1


async def test_no_retry_reaches_past_the_deadline() -> None:
    async with connected(ClientOptions(max_retry_wait_seconds=100)) as (fake, client):
        fake.script(Script.failing(QueueFull("full", retry_after_seconds=60.0)))
        start = time.monotonic()
        with pytest.raises(QueueFull) as refusal:
            await all_events(client.generate(prompt(), timeout=30.0))
        assert time.monotonic() - start < 20
        assert refusal.value.retry_after_seconds == 60.0
        assert len(fake.calls) == 1


async def test_attempts_share_one_deadline() -> None:
    async with connected() as (fake, client):
        fake.script(
            Script.failing(EngineUnavailable("restarting", retry_after_seconds=0.5)),
            Script.of_tokens((1,)),
        )
        await all_events(client.generate(prompt(), timeout=8.0))
        first, second = (call.timeout_seconds for call in fake.calls)
        assert first is not None
        assert second is not None
        assert first - second >= 0.45


# ---------------------------------------------------------------- deadlines


async def test_a_deadline_ends_the_call_on_both_sides() -> None:
    """Before Accepted, after it, and in mid-stream."""

    async def hanging(client: EngineClient, request_id: str) -> EngineClientError:
        with pytest.raises(DeadlineExceeded) as failure:
            await all_events(client.generate(prompt(request_id), timeout=3.0))
        return failure.value

    async with connected() as (fake, client):
        fake.script(
            *(Script((*steps, Hang())) for steps in ((), (Accept(),), (Accept(), Emit((1,)))))
        )
        start = time.monotonic()
        failures = await asyncio.gather(*(hanging(client, name) for name in "abc"))
        assert 2.9 < time.monotonic() - start < 20
        assert [failure.request_id for failure in failures] == ["a", "b", "c"]
        assert [await call.wait_closed() for call in fake.calls] == [Outcome.CANCELLED] * 3


async def test_no_time_at_all_sends_nothing() -> None:
    async with connected() as (fake, client):
        with pytest.raises(DeadlineExceeded):
            await all_events(client.generate(prompt(), timeout=0.0))
        with pytest.raises(ValueError, match="negative"):
            client.generate(prompt(), timeout=-1.0)
        assert not fake.calls


async def test_calls_about_the_engine_have_a_deadline_of_their_own() -> None:
    async with connected(ClientOptions(call_timeout_seconds=2)) as (fake, client):
        fake.freeze()
        with pytest.raises(DeadlineExceeded):
            await client.get_load()
        fake.thaw()
        assert (await client.get_load()).ready


# ---------------------------------------------------------------- engines that go away


async def test_an_engine_that_dies_ends_its_streams() -> None:
    async with connected() as (fake, client):
        fake.script(Script((Accept(), Emit((1, 2)), Hang())))
        async with client.generate(prompt()) as stream:
            await stream.wait_accepted()
            await anext(stream)
            await anext(stream)
            reading = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.05)
            await fake.kill()
            with pytest.raises(EngineUnavailable) as failure:
                await asyncio.wait_for(reading, 10)
        assert failure.value.usage == Usage(3, 0, 2)


async def test_a_restarted_engine_is_found_again() -> None:
    async with connected() as (fake, client):
        for _ in range(2):
            await all_events(client.generate(prompt()))
            assert (await client.get_model_info()).model == "fake"
            await fake.kill()
            with pytest.raises(EngineUnavailable):
                await client.get_load()
            await fake.start()
            await client.wait_ready(20)
        assert isinstance((await all_events(client.generate(prompt())))[-1], Finished)


async def test_nobody_there_is_told_quickly() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening
        async with EngineClient(f"127.0.0.1:{unused.getsockname()[1]}", options=QUICK) as client:
            start = time.monotonic()
            with pytest.raises(EngineUnavailable):
                await all_events(client.generate(prompt()))
            with pytest.raises(EngineUnavailable):
                await client.get_server_info()
            with pytest.raises(EngineUnavailable, match="not ready within"):
                await client.wait_ready(0.3)
            assert time.monotonic() - start < 10


async def test_closing_the_client_ends_what_is_open() -> None:
    async with connected() as (fake, client):
        fake.script(Script((Accept(), Hang())))
        stream = client.generate(prompt())
        await stream.wait_accepted()
        await anext(stream)
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(CallCancelled):
            await asyncio.wait_for(reading, 10)
        assert await fake.calls[0].wait_closed() is Outcome.CANCELLED
        for call in (client.get_load(), all_events(client.generate(prompt()))):
            with pytest.raises(CallCancelled, match="closed"):
                await call
        await client.close()


async def test_abort_ends_samples_one_by_one() -> None:
    async with connected() as (fake, client):
        fake.script(Script((Accept(), Emit((1,)), Emit((2,), index=1), Hang(), Finish())))
        async with client.generate(prompt("mine", n=2)) as stream:
            await stream.wait_accepted()
            for _ in range(3):
                await anext(stream)
            for index in (1, 0):
                await client.abort(stream.request_id, (index,))
                event = await asyncio.wait_for(anext(stream), 10)
                assert isinstance(event, Finished)
                assert (event.index, event.reason.value) == (index, "abort")
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert [(abort.request_id, abort.indices) for abort in fake.aborts] == [
            ("mine", (1,)),
            ("mine", (0,)),
        ]
        await client.abort("unknown")
