"""The closed loop and the window, with calls that take made-up times."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from clients.bench.answer import Answer
from clients.bench.load import closed_loop, windowed_loop
from clients.bench.target import Call
from clients.bench.workloads import Window
from tests.virtual_time import VirtualClock


@pytest.fixture(autouse=True)
def answers_tell_virtual_time(virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.bench.answer.perf_counter", virtual_clock.seconds)


class Calls:
    """Calls that take `seconds` each, and how many of them were open at once."""

    def __init__(self, seconds: float = 0.001) -> None:
        self.seconds = seconds
        self.num_open = 0
        self.most_open = 0
        self.begun: list[int] = []

    def make(self, number: int) -> Call:
        async def call(answer: Answer) -> None:
            answer.send()
            self.begun.append(number)
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            try:
                await asyncio.sleep(self.seconds)
            finally:
                self.num_open -= 1
            answer.end()

        return call

    def take(self, count: int) -> Iterator[Call]:
        return map(self.make, range(count))


@pytest.mark.parametrize(("concurrency", "count"), [(1, 3), (4, 9), (8, 3)])
async def test_each_call_is_sent_once_and_so_many_at_a_time(concurrency: int, count: int) -> None:
    calls = Calls()
    answers: list[Answer] = []
    await closed_loop(calls.take(count), concurrency, answers)
    assert calls.begun == list(range(count))
    assert calls.most_open == min(concurrency, count)
    assert [answer.ended_seconds is None for answer in answers] == [False] * count


async def test_a_stream_goes_on_when_its_own_answer_came_not_when_all_did() -> None:
    slow, quick = Calls(0.2), Calls(0.001)
    answers: list[Answer] = []
    calls = [slow.make(0), *quick.take(5)]
    loop = asyncio.create_task(closed_loop(calls, 2, answers))
    await asyncio.sleep(0.1)
    assert (len(quick.begun), slow.num_open) == (5, 1)
    await loop


async def test_a_cancelled_loop_leaves_what_it_began() -> None:
    calls = Calls(60.0)
    answers: list[Answer] = []
    loop = asyncio.create_task(closed_loop(calls.take(9), 3, answers))
    await asyncio.sleep(0.01)
    loop.cancel()
    await asyncio.wait((loop,))
    assert loop.cancelled()
    assert calls.num_open == 0
    assert [answer.ended_seconds for answer in answers] == [None] * 3


async def run_window(
    short: Calls, long: Calls, window: Window, num_long: int = 2
) -> tuple[list[Answer], list[Answer], float]:
    loop = asyncio.get_running_loop()
    start = loop.time()
    answers: list[Answer] = []
    long_answers: list[Answer] = []
    long_calls = list(long.take(num_long))
    await windowed_loop(short.make, long_calls, 2, window, answers, long_answers)
    return answers, long_answers, loop.time() - start


async def test_streams_begin_until_the_end_and_long_prompts_come_in_between() -> None:
    window = Window(
        duration_seconds=0.95, grace_seconds=5, long_start_seconds=0.05, long_interval_seconds=0.05
    )
    short, long = Calls(0.1), Calls(0.02)
    answers, long_answers, seconds = await run_window(short, long, window)
    assert all(answer.ended_seconds is not None for answer in (*answers, *long_answers))
    assert short.most_open == 2
    assert len(answers) == 2 * 10
    assert len(long_answers) == 2
    gap = long_answers[1].sent_seconds - long_answers[0].sent_seconds
    assert gap == pytest.approx(0.05)
    assert seconds == pytest.approx(1.0)


async def test_streams_that_outlast_the_grace_are_cut_off() -> None:
    window = Window(duration_seconds=0.05, grace_seconds=0.05)
    short = Calls(60.0)
    answers, long_answers, seconds = await run_window(short, Calls(), window)
    assert [answer.ended_seconds for answer in answers] == [None, None]
    assert (short.num_open, long_answers) == (0, [])
    assert seconds == pytest.approx(0.1)


async def test_a_long_prompt_that_outlasts_the_streams_is_cut_off() -> None:
    window = Window(duration_seconds=0.7, grace_seconds=5, long_start_seconds=0.0)
    long = Calls(60.0)
    answers, long_answers, _ = await run_window(Calls(0.01), long, window, num_long=1)
    assert all(answer.ended_seconds is not None for answer in answers)
    assert [answer.ended_seconds for answer in long_answers] == [None]
    assert long.num_open == 0


async def test_no_long_prompt_comes_just_before_the_end() -> None:
    window = Window(duration_seconds=0.4, grace_seconds=5, long_start_seconds=0.0)
    _, long_answers, _ = await run_window(Calls(0.01), Calls(), window)
    assert long_answers == []


async def test_a_fault_of_our_own_is_not_taken_for_the_servers() -> None:
    async def broken(answer: Answer) -> None:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        await closed_loop([broken], 1, [])
    assert caught.group_contains(ZeroDivisionError)
