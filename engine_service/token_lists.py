"""A caller's lists of token ids as flat arrays, made once for all samples of a request.

Some have as many entries as the vocabulary; a step then takes them as they are, without a look at
each token.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from engine_service.messages import SamplingParams, StoppingCriteria


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Shared by samples, and never changed."""

    biased: array[int]
    biases: array[float]  # float32, of those
    allowed: array[int]  # empty: all
    early_ends: array[int]  # not to come before min_tokens

    @classmethod
    def of(cls, sampling: SamplingParams, stopping: StoppingCriteria) -> TokenLists:
        ends = (*stopping.eos_token_ids, *stopping.stop_token_ids) if stopping.min_tokens else ()
        return cls(
            biased=array("q", sampling.logit_bias),
            biases=array("f", sampling.logit_bias.values()),
            allowed=array("q", sampling.allowed_token_ids),
            early_ends=array("q", ends),
        )
