"""Long lists of tokens are read once a request, and do in a step what short ones do."""

from __future__ import annotations

from collections.abc import Iterator, ValuesView

import torch
from torch import Tensor

from engine_service.logit_edits import apply_logit_bias, keep_allowed_tokens, mask_early_ends
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.request import Request

VOCAB = 1000
MINUS_INF = float("-inf")


class ReadOnce(tuple[int, ...]):
    """Token ids that a step must not walk through again."""

    __slots__ = ()
    is_closed = False

    def __iter__(self) -> Iterator[int]:
        assert not self.is_closed, "a step reads the list token by token"
        return super().__iter__()


class ReadOnceBias(dict[int, float]):
    is_closed = False

    def __iter__(self) -> Iterator[int]:
        assert not self.is_closed, "a step reads the biases token by token"
        return super().__iter__()

    def values(self) -> ValuesView[float]:  # type: ignore[override]
        assert not self.is_closed, "a step reads the biases token by token"
        return super().values()


def random_logits(rows: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3))


def request(sampling: SamplingParams, stopping: StoppingCriteria | None = None) -> Request:
    return Request("r", 0, [5], sampling, stopping or StoppingCriteria(max_tokens=9))


def test_a_step_does_not_walk_through_the_lists() -> None:
    allowed, ends = ReadOnce(range(0, VOCAB, 3)), ReadOnce(range(7, VOCAB, 5))
    bias = ReadOnceBias({i: i / 100 for i in range(0, VOCAB, 2)})
    sampling = SamplingParams(allowed_token_ids=allowed, logit_bias=bias)
    stopping = StoppingCriteria(max_tokens=9, min_tokens=2, stop_token_ids=ends)
    plain, listed = request(SamplingParams()), request(sampling, stopping)
    expected = random_logits(4)
    for row in (1, 3):
        expected[row, list(bias)] += torch.tensor(list(bias.values()))
        kept = torch.zeros(VOCAB, dtype=torch.bool)
        kept[list(allowed)] = True
        kept[list(ends)] = False
        expected[row, ~kept] = MINUS_INF
    ReadOnce.is_closed = ReadOnceBias.is_closed = True
    try:
        logits = random_logits(4)
        requests = [plain, listed, plain, listed]
        apply_logit_bias(logits, requests)
        keep_allowed_tokens(logits, requests)
        masked = mask_early_ends(logits, requests)
    finally:
        ReadOnce.is_closed = ReadOnceBias.is_closed = False
    assert torch.equal(logits, expected)
    assert masked.restore(logits, {3, 0})
    assert torch.equal(logits[1], expected[1])
    back = list(set(allowed) & set(ends))
    assert back
    assert bool(logits[3, back].isfinite().all())


def test_ends_are_free_from_min_tokens_on() -> None:
    stopping = StoppingCriteria(max_tokens=9, min_tokens=1, eos_token_ids=(2,))
    made = request(SamplingParams(), stopping)
    logits = random_logits(1)
    mask_early_ends(logits, [made])
    assert logits[0, 2] == MINUS_INF
    made.append_output(40)
    logits = random_logits(1)
    assert not mask_early_ends(logits, [made]).token_ids
    assert torch.equal(logits, random_logits(1))
