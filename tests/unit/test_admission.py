"""The bounded queue and its retry hint."""

from __future__ import annotations

import pytest

from engine_service.admission import Admission
from engine_service.errors import QueueFull


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
    admission.reset()
    admission.enter(4, 10, now_seconds=1)


def test_tokens_are_limited_but_a_lone_request_passes() -> None:
    admission = Admission(max_queued_samples=10, max_queued_tokens=100)
    admission.enter(1, 500, now_seconds=0)
    with pytest.raises(QueueFull):
        admission.enter(1, 1, now_seconds=0)
    admission.leave(500, 0, scheduled=False)
    admission.enter(1, 100, now_seconds=0)


def test_the_retry_hint_follows_the_measured_drain_rate() -> None:
    admission = Admission(max_queued_samples=10, max_queued_tokens=10_000)
    admission.enter(10, 1, now_seconds=0)
    for i in range(8):  # two a second
        admission.leave(1, i * 0.5, scheduled=True)
    admission.enter(8, 1, now_seconds=4)
    with pytest.raises(QueueFull) as caught:
        admission.enter(6, 1, now_seconds=4)
    assert caught.value.retry_after_seconds == pytest.approx(3.0)


def test_the_retry_hint_without_a_measurement_and_its_bounds() -> None:
    admission = Admission(max_queued_samples=1, max_queued_tokens=10)
    admission.enter(1, 1, now_seconds=0)
    with pytest.raises(QueueFull) as caught:
        admission.enter(1, 1, now_seconds=0)
    assert caught.value.retry_after_seconds == 1.0
    admission.leave(1, 0, scheduled=True)
    admission.enter(1, 1, now_seconds=0)
    with pytest.raises(QueueFull) as caught:
        admission.enter(100_000, 1, now_seconds=25)
    assert caught.value.retry_after_seconds == 60.0
    with pytest.raises(QueueFull) as caught:
        admission.enter(1, 1, now_seconds=0.001)
    assert caught.value.retry_after_seconds == 0.25
    with pytest.raises(QueueFull) as caught:  # the measurement is too old
        admission.enter(1, 1, now_seconds=100)
    assert caught.value.retry_after_seconds == 1.0
