"""When a failed call is tried again, and how long that waits."""

from __future__ import annotations

import time

import pytest

from clients import (
    ClientOptions,
    EngineClientError,
    EngineUnavailable,
    InternalError,
    OutOfMemory,
    QueueFull,
    SlowReader,
)
from clients.retry import Deadline, RetryPolicy, retrying

POLICY = RetryPolicy(
    max_attempts=4, initial_backoff_seconds=0.5, max_backoff_seconds=1.5, max_wait_seconds=10.0
)
QUICK = RetryPolicy(
    max_attempts=3, initial_backoff_seconds=0.01, max_backoff_seconds=0.02, max_wait_seconds=1.0
)


def test_backoff_doubles_up_to_its_maximum() -> None:
    error = EngineUnavailable("gone")
    delays = [POLICY.delay_seconds(attempt, error, 1.0) for attempt in (1, 2, 3)]
    assert delays == [0.5, 1.0, 1.5]
    assert POLICY.delay_seconds(1, error, 0.0) == 0.25


@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_a_hint_is_never_undercut(attempt: int, jitter: float) -> None:
    for error in (
        QueueFull("full", retry_after_seconds=2.0),
        EngineUnavailable("restarting", retry_after_seconds=2.0),
    ):
        delay = POLICY.delay_seconds(attempt, error, jitter)
        assert delay is not None
        assert 2.0 <= delay <= 3.5


def test_giving_up() -> None:
    assert POLICY.delay_seconds(4, EngineUnavailable("gone"), 0.0) is None
    assert POLICY.delay_seconds(1, QueueFull("full"), 0.0) is None
    assert POLICY.delay_seconds(1, QueueFull("full", retry_after_seconds=10.5), 0.0) is None


async def test_attempts_are_counted_from_one_and_bounded() -> None:
    attempts: list[int] = []

    async def failing(number: int) -> None:
        attempts.append(number)
        raise EngineUnavailable(f"attempt {number}")

    with pytest.raises(EngineUnavailable, match="attempt 3"):
        await retrying(failing, policy=QUICK, deadline=Deadline(None))
    assert attempts == [1, 2, 3]


@pytest.mark.parametrize(
    "error", [InternalError("broken"), OutOfMemory("no memory"), SlowReader("slow")]
)
async def test_other_failures_are_final(error: EngineClientError) -> None:
    attempts: list[int] = []

    async def failing(number: int) -> None:
        attempts.append(number)
        raise error

    with pytest.raises(type(error)):
        await retrying(failing, policy=QUICK, deadline=Deadline(None))
    assert attempts == [1]


@pytest.mark.usefixtures("virtual_clock")
async def test_no_wait_reaches_past_the_deadline() -> None:
    async def failing(number: int) -> None:
        raise QueueFull("full", retry_after_seconds=0.5)

    start = time.monotonic()
    with pytest.raises(QueueFull) as refusal:
        await retrying(failing, policy=QUICK, deadline=Deadline(0.3))
    assert time.monotonic() == start
    assert refusal.value.retry_after_seconds == 0.5


def test_options_are_checked() -> None:
    for bad in (
        {"max_attempts": 0},
        {"silence_seconds": 0.0},
        {"initial_backoff_seconds": float("nan")},
        {"max_retry_wait_seconds": -1.0},
        {"max_message_bytes": 0},
    ):
        with pytest.raises(ValueError, match="must"):
            ClientOptions(**bad)
    with pytest.raises(ValueError, match="negative"):
        Deadline(-1.0)
