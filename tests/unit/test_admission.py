"""The bounded queue, the predicted wait, and the retry hint."""

from __future__ import annotations

import math

import pytest

from engine_service.admission import Admission, DrainRate
from engine_service.errors import QueueFull, WaitTooLong

LEAST = 0.25  # seconds of any hint


def test_samples_are_counted_until_they_leave() -> None:
    admission = Admission(max_queued_samples=4, max_queued_tokens=1_000)
    admission.enter(3, 10, now_seconds=0)
    with pytest.raises(QueueFull):
        admission.enter(2, 10, now_seconds=0)
    admission.enter(1, 10, now_seconds=0)
    assert (admission.num_queued_samples, admission.num_queued_tokens) == (4, 40)
    with pytest.raises(QueueFull):
        admission.enter(1, 10, now_seconds=0)
    admission.leave(10, 1, scheduled=True)
    admission.enter(1, 5, now_seconds=1)
    assert (admission.num_queued_samples, admission.num_queued_tokens) == (4, 35)
    admission.reset(now_seconds=1)
    admission.enter(4, 10, now_seconds=1)


def test_tokens_are_limited_but_a_lone_request_passes() -> None:
    admission = Admission(max_queued_samples=10, max_queued_tokens=100)
    admission.enter(1, 500, now_seconds=0)
    with pytest.raises(QueueFull):
        admission.enter(1, 1, now_seconds=0)
    admission.leave(500, 0, scheduled=False)
    admission.enter(1, 100, now_seconds=0)


def depart(admission: Admission, tokens: int, now_seconds: float) -> None:
    """One sample that ran has ended, and one that waited takes its place."""
    admission.freed()
    admission.leave(tokens, now_seconds, scheduled=True)


# ---------------------------------------------------------------- the measured rate


def drained(num_samples: int, seconds_each: float) -> DrainRate:
    """A queue that was never empty, up to the last departure."""
    rate = DrainRate()
    rate.queueing(True, 0)
    for number in range(num_samples):
        rate.departed((number + 1) * seconds_each)
    return rate


def test_the_rate_is_departures_over_time_spent_queueing() -> None:
    rate = drained(8, 0.5)
    assert rate.seconds_for(1, 4) == pytest.approx(0.5)
    assert rate.seconds_for(6, 4) == pytest.approx(3.0)
    assert rate.seconds_for(0, 4) == 0


def test_a_queue_that_stands_still_becomes_slower_by_the_second() -> None:
    rate = drained(8, 0.5)
    assert rate.seconds_for(1, 12) == pytest.approx(1.5)
    assert rate.seconds_for(1, 4 + 3_600) == 30.0  # none left in the whole window


def test_idle_time_says_nothing_about_the_rate() -> None:
    rate = drained(8, 0.5)
    rate.queueing(False, 4)
    assert rate.seconds_for(2, 4 + 3_600) == pytest.approx(1.0)
    rate.queueing(True, 10_000)
    assert rate.seconds_for(2, 10_001) == pytest.approx(2 * 5 / 8)


def test_the_window_forgets_how_it_was_before() -> None:
    rate = drained(100, 0.5)  # until 50 s
    for number in range(10):
        rate.departed(50 + (number + 1) * 3.0)  # until 80 s
    assert rate.seconds_for(1, 80) == pytest.approx(3.0, rel=0.1)


def test_nothing_measured_is_no_rate() -> None:
    rate = DrainRate()
    assert rate.seconds_for(5, 100) is None
    rate.queueing(True, 100)
    assert rate.seconds_for(5, 110) is None


# ---------------------------------------------------------------- hints


def full_after(
    departures: int, seconds_each: float, max_queued_tokens: int = 10_000
) -> tuple[Admission, float]:
    """Ten samples of one token wait, as after each departure; and the time then."""
    admission = Admission(max_queued_samples=10, max_queued_tokens=max_queued_tokens)
    admission.enter(10, 1, now_seconds=0)
    now = 0.0
    for _ in range(departures):
        now += seconds_each
        depart(admission, 1, now)
        admission.enter(1, 1, now)
    return admission, now


def test_the_hint_is_the_time_in_which_the_overflow_drains() -> None:
    admission, now = full_after(8, 0.5)
    with pytest.raises(QueueFull) as caught:
        admission.enter(6, 1, now)
    hint = caught.value.retry_after_seconds
    assert hint is not None
    assert hint == pytest.approx(LEAST + 3.0 * 1.1 + 0.5)
    for _ in range(6):  # and at that rate there is room before
        depart(admission, 1, now)
    admission.enter(6, 1, now + hint)


def test_the_hint_for_tokens_counts_the_samples_that_hold_them() -> None:
    admission, now = full_after(8, 0.5, max_queued_tokens=12)
    with pytest.raises(QueueFull) as caught:
        admission.enter(1, 5, now)  # no room among 10 samples
    assert caught.value.retry_after_seconds == pytest.approx(LEAST + 0.5 * 1.1 + 0.5)
    admission, now = full_after(8, 0.5, max_queued_tokens=12)
    admission.leave(1, now, scheduled=False)
    with pytest.raises(QueueFull) as caught:
        admission.enter(1, 7, now)  # 9 wait, 12 may: 4 tokens, each a sample, are too many
    assert caught.value.retry_after_seconds == pytest.approx(LEAST + 2.0 * 1.1 + 0.5)


def test_the_hint_without_a_measurement_and_its_bounds() -> None:
    admission = Admission(max_queued_samples=1, max_queued_tokens=10)
    admission.enter(1, 1, now_seconds=0)
    with pytest.raises(QueueFull) as caught:
        admission.enter(1, 1, now_seconds=0)
    assert caught.value.retry_after_seconds == LEAST + 1.0
    depart(admission, 1, 0.001)
    admission.enter(1, 1, now_seconds=1)
    with pytest.raises(QueueFull) as caught:
        admission.enter(1, 1, now_seconds=1)
    assert caught.value.retry_after_seconds == pytest.approx(LEAST, abs=0.01)
    with pytest.raises(QueueFull) as caught:
        admission.enter(100_000, 1, now_seconds=25)
    assert caught.value.retry_after_seconds == 60.0


def test_who_says_that_it_comes_again_is_never_taken_for_a_newcomer() -> None:
    admission, now = full_after(8, 0.5)
    hints = []
    for _ in range(2):
        with pytest.raises(QueueFull) as caught:
            admission.enter(1, 1, now, attempt=1)
        hints.append(caught.value.retry_after_seconds or 0.0)
    assert hints == pytest.approx([LEAST + (1 * 1.1 + 1) / 2, LEAST + (2 * 1.1 + 1) / 2])
    depart(admission, 1, now + 0.5)
    depart(admission, 1, now + 1.0)
    at = now + hints[0]
    with pytest.raises(QueueFull, match="2 more were told when to come"):
        admission.enter(2, 1, at, attempt=1)  # both places are promised
    admission.enter(1, 1, at, attempt=2)
    admission.enter(1, 1, at, attempt=2)
    assert admission.num_queued_samples == 10


def test_each_refusal_opens_the_door_a_quarter_wider_up_to_twice_the_limits() -> None:
    admission, now = full_after(8, 0.5)
    room = {1: 0, 2: 2, 3: 5, 4: 7, 5: 10, 4_000_000_000: 10}  # beyond the 10 that may wait
    for attempt, num_let_in in room.items():
        while admission.num_queued_samples < 10 + num_let_in:
            admission.enter(1, 1, now, attempt=attempt)
        with pytest.raises(QueueFull):
            admission.enter(1, 1, now, attempt=attempt)


# ---------------------------------------------------------------- the predicted wait


def waiting_at_two_a_second(num_waiting: int, max_wait_seconds: float) -> Admission:
    """At time 4, and the queue never was empty."""
    admission = Admission(100, 10_000, max_wait_seconds)
    admission.enter(8 + num_waiting, 1, now_seconds=0)
    for number in range(8):
        depart(admission, 1, (number + 1) * 0.5)
    return admission


def test_a_wait_beyond_the_servers_limit_is_refused_with_when_it_will_do() -> None:
    admission = waiting_at_two_a_second(10, max_wait_seconds=3.0)  # 5 s to wait
    with pytest.raises(WaitTooLong, match=r"10 samples wait, for 5\.0 s") as caught:
        admission.enter(1, 1, now_seconds=4)
    assert caught.value.retry_after_seconds == pytest.approx(LEAST + 2.0 * 1.1 + 0.5)
    assert admission.num_queued_samples == 10
    for number in range(4):
        depart(admission, 1, 4 + (number + 1) * 0.5)
    admission.enter(1, 1, now_seconds=6)


def test_a_wait_beyond_the_requests_own_patience_is_refused() -> None:
    admission = waiting_at_two_a_second(10, max_wait_seconds=math.inf)
    with pytest.raises(WaitTooLong) as caught:
        admission.enter(1, 1, now_seconds=4, patience_seconds=4.5)
    assert caught.value.retry_after_seconds == pytest.approx(LEAST + 0.5 * 1.1 + 0.5)
    admission.enter(1, 1, now_seconds=4, patience_seconds=5.5)


def test_nobody_is_refused_for_the_wait_when_nothing_waits() -> None:
    admission = waiting_at_two_a_second(0, max_wait_seconds=0.001)
    admission.enter(3, 1, now_seconds=500, patience_seconds=0.001)


def test_an_unmeasured_wait_is_not_too_long() -> None:
    admission = Admission(100, 10_000, max_wait_seconds=0.001)
    admission.enter(5, 1, now_seconds=0)
    admission.enter(5, 1, now_seconds=0)


def test_a_deadline_that_has_passed_is_no_reason_to_say_that_the_queue_is_full() -> None:
    admission = Admission(max_queued_samples=10, max_queued_tokens=1000)
    admission.enter(1, 10, now_seconds=0.0)
    depart(admission, 10, now_seconds=1.0)
    admission.enter(1, 10, now_seconds=2.0, patience_seconds=-0.5)
    assert admission.num_queued_samples == 1
