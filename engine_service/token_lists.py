"""A caller's lists of token ids in the form that a step takes, made once for all samples of a
request.

Some have as many entries as the vocabulary; a step then takes them as they are, without a look at
each token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from engine_service.messages import SamplingParams, StoppingCriteria


@dataclass(frozen=True, slots=True)
class BadSequences:
    """Token sequences that the output must not come to contain."""

    single_ids: array[int]  # sequences of one token
    by_token_before: dict[int, list[tuple[int, ...]]]  # the others, by their last token but one

    @classmethod
    def of(cls, sequences: Sequence[tuple[int, ...]]) -> BadSequences:
        by_token_before: dict[int, list[tuple[int, ...]]] = {}
        for sequence in sequences:
            if len(sequence) > 1:
                by_token_before.setdefault(sequence[-2], []).append(sequence)
        singles = array("q", [sequence[0] for sequence in sequences if len(sequence) == 1])
        return cls(singles, by_token_before)

    def completing(self, output: Sequence[int]) -> array[int]:
        """The last token of every sequence whose other tokens the output ends with."""
        likely = self.by_token_before.get(output[-1], ()) if output else ()
        ids = [sequence[-1] for sequence in likely if _ends_with(output, sequence[:-1])]
        return self.single_ids + array("q", ids) if ids else self.single_ids


def _ends_with(output: Sequence[int], tokens: Sequence[int]) -> bool:
    return list(output[-len(tokens) :]) == list(tokens)


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Shared by samples, and never changed."""

    biased: array[int]
    biases: array[float]  # float32, of those
    allowed: array[int]  # empty: all
    bad_sequences: BadSequences | None
    early_ends: array[int]  # not to come before min_tokens

    @classmethod
    def of(cls, sampling: SamplingParams, stopping: StoppingCriteria) -> TokenLists:
        ends = (*stopping.eos_token_ids, *stopping.stop_token_ids) if stopping.min_tokens else ()
        bad = sampling.bad_token_sequences
        return cls(
            biased=array("q", sampling.logit_bias),
            biases=array("f", sampling.logit_bias.values()),
            allowed=array("q", sampling.allowed_token_ids),
            bad_sequences=BadSequences.of(bad) if bad else None,
            early_ends=array("q", ends),
        )
