"""What requests ask of their rows. Long lists of tokens are read once a request, not in a step."""

from __future__ import annotations

from collections.abc import Iterator, ValuesView

import torch
from torch import Tensor

from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.request import Request
from engine_service.sampling_batch import sampling_batch
from kernels.sampling_batch import SamplingBatch
from kernels.sampling_ops import reference_sampling_ops

VOCAB = 1000
MINUS_INF = float("-inf")
OPS = reference_sampling_ops()


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
        OPS.sample_rows(logits, batch_of([plain, listed, plain, listed]))
    finally:
        ReadOnce.is_closed = ReadOnceBias.is_closed = False
    assert torch.equal(logits, expected)


def batch_of(requests: list[Request]) -> SamplingBatch:
    return sampling_batch(requests, None, VOCAB, OPS)


def test_ends_are_free_from_min_tokens_on() -> None:
    stopping = StoppingCriteria(max_tokens=9, min_tokens=1, eos_token_ids=(2,))
    made = request(SamplingParams(), stopping)
    early_ends = batch_of([made]).early_ends
    assert early_ends is not None
    assert early_ends.token_ids_P.tolist() == [2]
    made.append_output(40)
    assert batch_of([made]).early_ends is None


def test_plain_greedy_rows_ask_for_nothing() -> None:
    greedy = request(SamplingParams(temperature=0.0))
    assert batch_of([greedy, greedy]) == SamplingBatch()


def test_the_batch_is_a_copy_and_requests_go_on_growing() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5)
    made = request(params)
    batch = batch_of([made])
    made.append_output(5)
    made.append_output(6)
    assert batch.penalties is not None
    assert batch.penalties.tokens.token_ids_P.tolist() == [5]
    assert batch.penalties.output_counts_P.tolist() == [0]
    again = batch_of([made]).penalties
    assert again is not None
    assert again.tokens.token_ids_P.tolist() == [5, 6]
    assert again.output_counts_P.tolist() == [1, 1]
