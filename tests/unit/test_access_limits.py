"""Limits of a key: what they count, and that who comes back after the hint is let in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from access.limits import Allowance, KeyLimits, Limits, RateLimited
from http_facade.keys import duration


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(limits: KeyLimits, what: Limits, key: str = "k") -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        limits.enter(key, what)
    return caught.value


def test_no_limits_count_nothing(clock: Clock) -> None:
    limits = KeyLimits(clock)
    assert limits.quotas("k") == {}
    allowances = [limits.enter("k", Limits()) for _ in range(1000)]
    allowances[0].reserve_tokens(10**9)
    assert limits.quotas("k") == {}


def test_requests_of_a_minute(clock: Clock) -> None:
    limits, six = KeyLimits(clock), Limits(requests_per_minute=6)
    for number in range(6):
        limits.enter("k", six)
        assert limits.quotas("k")["requests"].remaining == 5 - number
    assert refused(limits, six).retry_after_seconds == pytest.approx(10)
    limits.enter("other", six)  # has limits of its own
    clock.now += 4
    error = refused(limits, six)
    assert error.retry_after_seconds == pytest.approx(6) and "6 requests" in error.message
    clock.now += error.retry_after_seconds
    limits.enter("k", six)
    quota = limits.quotas("k")["requests"]
    assert (quota.limit, quota.remaining) == (6, 0)
    assert quota.reset_seconds == pytest.approx(60)
    clock.now += 3600
    limits.enter("k", six)
    assert limits.quotas("k")["requests"].remaining == 5


def test_tokens_are_reserved_and_what_was_not_used_comes_back(clock: Clock) -> None:
    limits, some = KeyLimits(clock), Limits(tokens_per_minute=600)
    first = limits.enter("k", some)
    first.reserve_tokens(500)
    second = limits.enter("k", some)
    with pytest.raises(RateLimited) as caught:
        second.reserve_tokens(200)
    assert caught.value.retry_after_seconds == pytest.approx(10)
    second.leave(0)
    first.leave(450)  # 50 of its 500 come back: 150 are there
    third = limits.enter("k", some)
    third.reserve_tokens(150)
    assert limits.quotas("k")["tokens"].remaining == 0
    third.leave(150)
    with pytest.raises(RateLimited) as caught:
        limits.enter("k", some).reserve_tokens(1)
    assert caught.value.retry_after_seconds == pytest.approx(0.1)


def test_a_second_reservation_takes_the_place_of_the_first(clock: Clock) -> None:
    limits, some = KeyLimits(clock), Limits(tokens_per_minute=600)
    allowance = limits.enter("k", some)
    for _ in range(5):
        allowance.reserve_tokens(400)
    assert limits.quotas("k")["tokens"].remaining == 200
    allowance.leave(0)
    limits.enter("k", some).reserve_tokens(600)


def test_a_request_refused_for_its_tokens_is_no_request(clock: Clock) -> None:
    limits, some = KeyLimits(clock), Limits(requests_per_minute=3, tokens_per_minute=100)
    limits.enter("k", some).reserve_tokens(100)
    for _ in range(10):
        allowance = limits.enter("k", some)
        with pytest.raises(RateLimited):
            allowance.reserve_tokens(10)
        allowance.leave(0)
        assert limits.quotas("k")["requests"].remaining == 2


def test_more_than_a_minutes_tokens_wait_for_a_full_bucket_and_leave_a_debt(clock: Clock) -> None:
    limits, some = KeyLimits(clock), Limits(tokens_per_minute=60)
    large = limits.enter("k", some)
    large.reserve_tokens(600)
    assert limits.quotas("k")["tokens"].remaining == 0
    large.leave(180)
    with pytest.raises(RateLimited) as caught:
        limits.enter("k", some).reserve_tokens(10)
    assert caught.value.retry_after_seconds == pytest.approx(130)  # 120 of debt, and the ten


def test_requests_at_once(clock: Clock) -> None:
    limits, two = KeyLimits(clock), Limits(max_concurrent_requests=2)
    first, second = limits.enter("k", two), limits.enter("k", two)
    assert refused(limits, two).retry_after_seconds == 1.0  # nothing is known yet
    clock.now += 4
    first.leave(0)
    third = limits.enter("k", two)
    clock.now += 1
    error = refused(limits, two)
    assert "2 requests running" in error.message
    assert error.retry_after_seconds == 0.5  # the oldest runs longer than any has
    second.leave(0)
    limits.enter("k", two)
    clock.now += 1
    assert refused(limits, two).retry_after_seconds == pytest.approx(5 - 2)  # third's, as second's
    third.leave(0)
    limits.enter("k", two)


def test_changed_limits_keep_what_was_used(clock: Clock) -> None:
    limits = KeyLimits(clock)
    for _ in range(8):
        limits.enter("k", Limits(requests_per_minute=10))
    limits.enter("k", Limits(requests_per_minute=20))
    assert limits.quotas("k")["requests"].remaining == 11
    refused(limits, Limits(requests_per_minute=5))
    running = limits.enter("k", Limits())
    running.leave(100)
    limits.enter("k", Limits(tokens_per_minute=60))
    unlimited = limits.enter("k", Limits(tokens_per_minute=60))
    limits.enter("k", Limits())
    unlimited.leave(5)  # the limit went while it ran


@given(
    per_minute=st.integers(1, 10**6),
    sizes=st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 30), st.floats(0, 1))),
    size=st.integers(1, 2 * 10**6),
)
def test_the_hint_is_true_and_no_longer_than_need_be(
    per_minute: int, sizes: list[tuple[int, float, float]], size: int
) -> None:
    clock = Clock()
    limits, some = KeyLimits(clock), Limits(tokens_per_minute=per_minute)

    def hint_of(allowance: Allowance, num_tokens: int) -> float:
        try:
            allowance.reserve_tokens(num_tokens)
        except RateLimited as error:
            return error.retry_after_seconds
        return 0.0

    for num_tokens, seconds, used in sizes:
        allowance = limits.enter("k", some)
        was_refused = hint_of(allowance, num_tokens) > 0
        clock.now += seconds
        allowance.leave(0 if was_refused else int(num_tokens * used))
    hint = hint_of(limits.enter("k", some), size)
    if hint > 1e-3:
        clock.now += hint * 0.99
        early = hint_of(limits.enter("k", some), size)
        assert early > 0
        clock.now += early + 1e-6  # the clock's own grain
        assert hint_of(limits.enter("k", some), size) == 0


def test_durations_read_as_openai_writes_them() -> None:
    written = {0: "0s", 0.0171: "18ms", 8.64: "8.64s", 59.9999: "1m0s", 360: "6m0s", 61.5: "1m1.5s"}
    assert {seconds: duration(seconds) for seconds in written} == written
