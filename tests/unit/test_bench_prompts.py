"""The prompts of `firsttoken bench`: known to the byte, new by seed, workload and place."""

from __future__ import annotations

import hashlib

import pytest

from clients.bench.run import Plan
from clients.bench.workloads import PromptKind, PromptSource, Sizes, Window, Workload

# Begins of SHA-256. Whoever changes these makes old figures incomparable with new ones.
KNOWN = {
    PromptKind.W1: (64, "bdc72e4ca7e58e77"),
    PromptKind.W2: (32, "d53f8ba13aba6f0c"),
    PromptKind.W3: (32, "3a10d7ef3a560e44"),
    PromptKind.W4: (64, "139b0bf9548643f6"),
    PromptKind.LONG: (8, "7b35c7d2147d905d"),
}


@pytest.mark.parametrize("kind", PromptKind)
def test_a_prompt_is_known_to_the_byte(kind: PromptKind) -> None:
    prompt = PromptSource("7", 8).prompt(kind, 1000)
    digest = hashlib.sha256(prompt.text.encode()).hexdigest()[:16]
    assert (prompt.max_tokens, digest) == KNOWN[kind]


def test_seed_workload_concurrency_and_index_each_make_another_prompt() -> None:
    texts = {
        PromptSource(seed, concurrency, Sizes(prompt_tokens=60)).prompt(kind, index).text
        for seed in ("1", "2")
        for concurrency in (1, 8)
        for kind in (PromptKind.W1, PromptKind.W3)
        for index in (999, 1000)
    }
    assert len(texts) == 16


def test_w2_shares_its_prefix_within_a_seed_only() -> None:
    one, two = (PromptSource("7", 8).prompt(PromptKind.W2, index).text for index in (1000, 1001))
    other = PromptSource("8", 8).prompt(PromptKind.W2, 1000).text
    assert one.split()[:1500] == two.split()[:1500]
    assert one.split()[1500:] != two.split()[1500:]
    assert other.split()[:20] != one.split()[:20]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (PromptKind.W1, 60),
        (PromptKind.W2, 1540),
        (PromptKind.W3, 1024),
        (PromptKind.LONG, 3000),
    ],
)
def test_sizes_are_the_workloads_unless_given(kind: PromptKind, words: int) -> None:
    assert len(PromptSource("7", 1).prompt(kind, 0).text.split()) == words
    sizes = Sizes(
        prompt_tokens=5,
        prefix_tokens=7,
        max_tokens=3,
        long_prompt_tokens=9,
        long_max_tokens=2,
    )
    prompt = PromptSource("7", 1, sizes).prompt(kind, 0)
    expected = {PromptKind.W2: (47, 3), PromptKind.LONG: (9, 2)}.get(kind, (5, 3))
    assert (len(prompt.text.split()), prompt.max_tokens) == expected


def test_only_w4_has_a_schema() -> None:
    source = PromptSource("7", 1)
    with_schema = [kind for kind in PromptKind if source.prompt(kind, 0).has_schema]
    assert with_schema == [PromptKind.W4]


def test_requests_and_warm_up_suit_the_workload() -> None:
    counts = {workload: workload.num_requests(8) for workload in Workload}
    assert counts == {
        Workload.W1: 24,
        Workload.W2: 24,
        Workload.W3: 8,
        Workload.W4: 24,
        Workload.W5_BASE: 0,
        Workload.W5: 0,
    }
    assert Workload.W1.num_requests(1) == 6
    assert [w.value for w in Workload if w.num_warmup] == ["w1", "w2", "w4"]


def test_w5_is_preceded_by_the_same_streams_alone_with_other_prompts() -> None:
    plan = Plan(Workload.W5, 4, "7", num_warmup=2, window=Window(duration_seconds=6, num_long=3))
    base, mixed = plan.with_baseline()
    assert mixed == plan
    assert (base.workload, base.concurrency, base.num_warmup) == (Workload.W5_BASE, 4, 2)
    assert base.seed != plan.seed
    assert (base.window.duration_seconds, base.window.num_long) == (3, 0)
    plain = Plan(Workload.W1, 4, "7")
    assert plain.with_baseline() == [plain]
