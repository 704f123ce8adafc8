"""The door's promises: bounds hold, a refusal takes no place, a hint is true."""

from __future__ import annotations

import copy
import heapq
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine_service.admission import Admission
from engine_service.errors import QueueFull, WaitTooLong

LIMIT = 20  # samples
MAX_TOKENS = 50


def depart(admission: Admission, now: float) -> None:
    """One sample that ran has ended, and one that waited takes its place."""
    admission.freed()
    admission.leave(1, now, scheduled=True)


def steadily_draining(
    num_waiting: int, seconds_each: float, num_left: int, max_wait_seconds: float = math.inf
) -> tuple[Admission, float]:
    """`num_left` have left, one after the other, and `num_waiting` wait; and the time then."""
    admission = Admission(LIMIT, 10_000, max_wait_seconds)
    admission.enter(num_waiting, 1, now_seconds=0)
    for number in range(1, num_left + 1):
        depart(admission, number * seconds_each)
        admission.enter(1, 1, number * seconds_each)
    return admission, num_left * seconds_each


@given(
    num_waiting=st.integers(1, LIMIT),
    n=st.integers(1, LIMIT),
    seconds_each=st.floats(0.3, 2.0),
    num_left=st.integers(1, 200),
)
def test_who_comes_back_after_the_hint_is_let_in_and_not_much_before(
    num_waiting: int, n: int, seconds_each: float, num_left: int
) -> None:
    assume(num_waiting + n > LIMIT)
    admission, now = steadily_draining(num_waiting, seconds_each, num_left)
    with pytest.raises(QueueFull) as caught:
        admission.enter(n, 1, now)
    hint = caught.value.retry_after_seconds
    assert hint is not None
    # the rate is counted in whole departures of a window of thirty seconds
    error = 2 * seconds_each / 30 * hint + 1e-6
    overflow = num_waiting + n - LIMIT
    expected = min(0.25 + (overflow * 1.1 + 1) * seconds_each, 60)
    assert hint == pytest.approx(expected, abs=error + seconds_each / 2)
    for number in range(1, overflow):
        depart(admission, now + number * seconds_each)
    before_the_last = now + (overflow - 1) * seconds_each
    if before_the_last < now + hint:
        with pytest.raises(QueueFull):
            copy.deepcopy(admission).enter(n, 1, before_the_last)
    depart(admission, before_the_last + seconds_each)
    admission.enter(n, 1, max(before_the_last + seconds_each, now + hint))


@given(
    num_callers=st.integers(2, 60),
    seconds_each=st.floats(0.02, 0.5),
    newcomers=st.integers(0, 40),
    # A margin of a tenth, less what the rate may be wrong by: see above.
    slower=st.floats(0.9, 1.06),
)
def test_all_that_are_refused_at_once_are_let_in_when_told(
    num_callers: int, seconds_each: float, newcomers: int, slower: float
) -> None:
    """Also if others come meanwhile, and the queue drains a little slower or faster than before."""
    admission, now = steadily_draining(LIMIT, seconds_each, 60)
    hints = []
    for _ in range(num_callers):
        with pytest.raises(QueueFull) as caught:
            admission.enter(1, 1, now)
        hints.append(caught.value.retry_after_seconds or 0.0)
    assume(max(hints) < 60)
    assert hints == sorted(hints)
    end = max(hints) + seconds_each
    events = [(slower * seconds_each, "leave")]
    events += [(end * (k + 0.5) / (newcomers + 1), "new") for k in range(newcomers)]
    events += [(hint + 1e-9, "return") for hint in hints]
    heapq.heapify(events)
    while len(events) > 1:
        seconds, what = heapq.heappop(events)
        if what == "leave":
            heapq.heappush(events, (seconds + slower * seconds_each, "leave"))
            if admission.num_queued_samples:
                depart(admission, now + seconds)
        elif what == "new" and any(abs(at - seconds) < 1e-6 for at, _ in events):
            pass  # who comes just between a time that was told and its caller is taken for that one
        else:
            refusal = refusal_of(admission, 1, now + seconds, math.inf)
            assert what == "new" or refusal is None, "refused a second time"
            if refusal is not None and refusal.retry_after_seconds is not None:
                heapq.heappush(events, (seconds + refusal.retry_after_seconds + 1e-9, "return"))
        assert admission.num_queued_samples <= LIMIT


def refusal_of(
    admission: Admission, size: int, now: float, patience_seconds: float
) -> QueueFull | None:
    """Of `size` samples of `size` tokens each."""
    try:
        admission.enter(size, size, now, patience_seconds)
    except QueueFull as refusal:
        return refusal
    return None


def check_refusal(refusal: QueueFull, num_tokens: int, num_samples: int, size: int) -> None:
    assert refusal.retry_after_seconds is not None
    assert 0.25 <= refusal.retry_after_seconds <= 60
    has_room = num_samples + size <= LIMIT and num_tokens + size * size <= MAX_TOKENS
    if isinstance(refusal, WaitTooLong):
        assert num_samples + size <= LIMIT
    else:
        assert not has_room or "more were told when to come" in refusal.message


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "leave", "abort", "wait"]),
            st.integers(1, 8),
            st.floats(0, 40),
            st.sampled_from([math.inf, 0.001, 1.0]),
        ),
        max_size=60,
    )
)
def test_the_bounds_hold_and_a_refusal_takes_no_place(
    moves: list[tuple[str, int, float, float]],
) -> None:
    admission = Admission(LIMIT, MAX_TOKENS, max_wait_seconds=5)
    waiting: list[int] = []  # tokens of each sample
    now = 0.0
    for move, size, seconds, patience in moves:
        if move == "enter":
            refusal = refusal_of(admission, size, now, patience)
            if refusal is None:
                waiting += [size] * size
            else:
                assert waiting, "nobody is refused when nothing waits"
                check_refusal(refusal, sum(waiting), len(waiting), size)
        elif move == "wait":
            now += seconds
        elif waiting:
            if move == "leave":
                admission.freed()
            admission.leave(waiting.pop(0), now, scheduled=move == "leave")
        assert admission.num_queued_samples == len(waiting) <= LIMIT
        assert admission.num_queued_tokens == sum(waiting)
