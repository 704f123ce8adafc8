"""What a step samples, by row of its logits: the data between the engine and the sampling ops.

A row costs only what its request asks for: each kind of edit names the rows that it concerns, in
ascending order, and is None where there are none.

    rows_E         [  2,        5,   6 ]
    starts_E1      [  0,        3,   4,     6 ]     row 2 has tokens 0 to 3, row 5 the next one
    token_ids_P    [ 17, 4, 9, 31,  4, 17 ]

Letters are dimensions, as in `kernels.ops`:

    R  rows of the step            V  vocabulary            W  words of a bitmask row
    E  rows that an edit concerns  P  their (row, token) pairs
    G  rows with a grammar         D  rows that are drawn   L  rows that tell logprobs
    N  likeliest tokens told of, the most of all rows
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.array_places import HostArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Float32s = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RowTokens:
    rows_E: Ints
    starts_E1: Ints
    token_ids_P: Ints

    @property
    def rows_P(self) -> Ints:
        """The row of each pair."""
        return np.repeat(self.rows_E, np.diff(self.starts_E1))


@dataclass(frozen=True, slots=True)
class Penalties:
    tokens: RowTokens  # of the prompt, the output, or both; distinct within a row
    output_counts_P: Ints  # how often each was generated
    repetition_E: Float32s  # 1: off
    frequency_E: Floats
    presence_E: Floats


@dataclass(frozen=True, slots=True)
class Biases:
    tokens: RowTokens  # distinct within a row
    biases_P: Float32s


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Bit j of word w of a row is token 32 * w + j; 0: forbidden."""

    rows_G: Ints
    words_GW: Tensor  # int32 on the CPU; W = ceil(V / 32)


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that are drawn; all others take their largest logit."""

    rows_D: Ints
    temperature_D: Floats  # above 0
    top_k_D: Ints  # 0, or V and more: off
    top_p_D: Floats  # 1: off
    min_p_D: Floats  # 0: off
    uniform_D: Floats  # strictly between 0 and 1

    def __getitem__(self, places: slice | Ints | NDArray[np.bool_]) -> Draws:
        """Some of them."""
        return Draws(
            self.rows_D[places],
            self.temperature_D[places],
            self.top_k_D[places],
            self.top_p_D[places],
            self.min_p_D[places],
            self.uniform_D[places],
        )


@dataclass(frozen=True, slots=True)
class ToldRows:
    rows_L: Ints
    num_top_L: Ints  # likeliest tokens beside the chosen one; at most V


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """One for each row of logits that tells of it, and samples nothing: a prompt's next tokens."""

    token_ids_L: Ints
    num_top_L: Ints  # likeliest tokens beside it; at most V


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """In the order in which a row is edited, drawn from and told of."""

    penalties: Penalties | None = None
    biases: Biases | None = None
    allowed: RowTokens | None = None  # -inf for all others
    banned: RowTokens | None = None  # -inf
    mask: TokenMask | None = None
    early_ends: RowTokens | None = None  # -inf, unless that leaves the row without a token
    draws: Draws | None = None
    told: ToldRows | None = None


class RowStatus(enum.IntEnum):
    SAMPLED = 0
    NOT_FINITE = 1  # a NaN or an infinity came from the model
    NOTHING_ALLOWED = 2  # all is -inf
    OVERFLOWS = 3  # an edit made a NaN, or more than a float holds


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Natural logs of softmax(logits). Of the likeliest, a row's first `num_top` are set."""

    logprobs_L: Float32s  # of the chosen token
    ranks_L: Ints  # 1 + tokens that are likelier
    top_token_ids_LN: Ints
    top_logprobs_LN: Float32s  # falling


@dataclass(frozen=True, slots=True)
class SampledRows:
    token_ids_R: Ints  # meaningless unless SAMPLED
    statuses_R: NDArray[np.int32]  # of RowStatus
    logprobs: LogprobRows | None  # by the rows of `told`; meaningless unless SAMPLED
    given: Sequence[LogprobRows] = ()  # of each GivenTokens


class PlannedRows(Protocol):
    """Rows to be sampled once there are logits."""

    @property
    def arrays(self) -> Sequence[HostArray]:
        """What the logits' device needs for it."""

    def launch(
        self, logits_RV: Tensor, on_device: Sequence[Tensor], given_logits: Iterable[Tensor] = ()
    ) -> RowsUnderWay:
        """Overwrites the logits. `on_device`: the arrays, which stay as they are until all that
        was launched with them is over. `given_logits`: [L, V] of each GivenTokens that was planned
        for; they are asked for when nothing needs those before them any more."""


class RowsUnderWay(Protocol):
    """Rows that a device may still sample."""

    @property
    def token_ids_R(self) -> Tensor:
        """int64, on the logits' device, in order with what is launched there; meaningless unless
        SAMPLED, but always a token of the vocabulary."""

    def wait(self) -> SampledRows: ...


@dataclass(frozen=True, slots=True)
class RowsDone:
    """RowsUnderWay that are sampled already."""

    rows: SampledRows
    device: torch.device  # the logits'

    @property
    def token_ids_R(self) -> Tensor:
        return torch.from_numpy(self.rows.token_ids_R).to(self.device)

    def wait(self) -> SampledRows:
        return self.rows
