"""Which tokens grammars allow next, for the constrained rows of one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GrammarBitmask:
    rows: list[int]  # among the step's requests that sample, in scheduled order
    words_GW: Tensor  # int32 on the CPU, [len(rows), ceil(vocab_size / 32)]; bit set: allowed
