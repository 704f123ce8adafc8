"""Scripts of a FakeEngine: the steps that the usual courses are made of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from clients import FinishReason, QueueFull
from clients.testing import Accept, Emit, Fail, FakeEngine, Finish, Pause, Progress, Script


@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [
        (1, [(1,), (2,), (3,), (4,), (5,)]),
        (2, [(1, 2), (3, 4), (5,)]),
        (9, [(1, 2, 3, 4, 5)]),
        ((1, 3), [(1,), (2, 3, 4), (5,)]),
        ((4, 1, 1), [(1, 2, 3, 4), (5,)]),
    ],
)
def test_chunk_sizes(sizes: int | Sequence[int], chunks: list[tuple[int, ...]]) -> None:
    script = Script.of_tokens((1, 2, 3, 4, 5), chunk_sizes=sizes)
    assert [step.token_ids for step in script.steps if isinstance(step, Emit)] == chunks
    assert isinstance(script.steps[-1], Finish)


@pytest.mark.parametrize("sizes", [0, (), (2, 0), -1])
def test_chunks_hold_a_token(sizes: int | Sequence[int]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Script.of_tokens((1, 2), chunk_sizes=sizes)


def test_samples_take_turns() -> None:
    script = Script.of_samples(
        ((1, 2), (3,)), delay_seconds=0.5, reason=FinishReason.LENGTH, cached_tokens=4
    )
    length = FinishReason.LENGTH
    assert script.steps == (
        Accept(),
        Progress(cached_tokens=4, index=0),
        Progress(cached_tokens=4, index=1),
        Pause(0.5),
        Emit((1,), 0),
        Emit((3,), 1),
        Finish(length, 1),
        Pause(0.5),
        Emit((2,), 0),
        Finish(length, 0),
    )


def test_no_tokens_and_no_acceptance() -> None:
    assert Script.of_tokens(()).steps == (Accept(), Progress(), Finish())
    error = QueueFull("full")
    assert Script.failing(error).steps == (Fail(error),)


def test_a_fake_needs_a_script_and_a_start() -> None:
    fake = FakeEngine()
    with pytest.raises(ValueError, match="script"):
        fake.script()
    with pytest.raises(RuntimeError, match="not started"):
        _ = fake.target
