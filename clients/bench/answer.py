"""One request as it is seen from here, filled in while its answer comes.

    sent        chunk 0      chunk 1  …  last chunk      end of the stream
     ├── TTFT ───┼─── ITL ────┼── … ──────┤                   │
     ├── E2E ────┼──────────── TPOT · (tokens - 1) ───────────┤

A chunk is one streamed event with text (gRPC: with tokens); it may hold several tokens, and
several may arrive at once, which makes gaps of 0. Tokens are what the server's usage says.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field
from time import perf_counter


class FailureKind(enum.Enum):
    """What went wrong with one request; the values are what reports say."""

    UNREACHABLE = "unreachable"  # no connection
    TIMEOUT = "timeout"  # of this side
    DISCONNECTED = "disconnected"  # the connection broke before the answer's end
    REFUSED = "refused"  # a status other than 200, or gRPC's OK
    STREAM_ERROR = "stream_error"  # an error event inside the stream
    BAD_STREAM = "bad_stream"  # no event stream, or events that can't be read
    NO_DONE = "no_done"  # the stream ended without [DONE]
    NO_USAGE = "no_usage"  # ended without a usage block: there is nothing to count tokens by
    NO_TEXT = "no_text"  # ended without any text
    CUT_OFF = "cut_off"  # still going when the measurement ended; no fault of the server's


@dataclass(frozen=True, slots=True)
class Failure:
    kind: FailureKind
    message: str
    status: str = ""  # of REFUSED: `http_429`, `grpc_queue_full`

    @property
    def name(self) -> str:
        return self.status or self.kind.value


@dataclass(frozen=True, slots=True)
class TokenUsage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None  # None: the server does not say


@dataclass(slots=True)
class Answer:
    """Times are seconds of `time.perf_counter`."""

    sent_seconds: float = 0.0
    chunk_seconds: list[float] = field(default_factory=list)
    ended_seconds: float | None = None
    texts: list[str] = field(default_factory=list)
    usage: TokenUsage | None = None
    finish_reason: str | None = None
    failure: Failure | None = None

    def send(self) -> None:
        self.sent_seconds = perf_counter()

    def end(self) -> None:
        self.ended_seconds = perf_counter()

    def fail(self, kind: FailureKind, message: str, status: str = "") -> None:
        """The first failure is kept: what follows is its consequence."""
        if self.failure is None:
            self.failure = Failure(kind, message, status)

    def cut_off(self) -> None:
        """The measurement ends before the answer does."""
        self.end()
        self.failure = Failure(FailureKind.CUT_OFF, "still going at the end of the measurement")

    @property
    def is_ok(self) -> bool:
        return self.failure is None and self.ended_seconds is not None

    @property
    def is_cut_off(self) -> bool:
        return self.failure is not None and self.failure.kind is FailureKind.CUT_OFF

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def completion_tokens(self) -> int:
        return 0 if self.usage is None else self.usage.completion_tokens

    @property
    def ttft_seconds(self) -> float | None:
        return self.chunk_seconds[0] - self.sent_seconds if self.chunk_seconds else None

    @property
    def e2e_seconds(self) -> float | None:
        return None if self.ended_seconds is None else self.ended_seconds - self.sent_seconds

    @property
    def tpot_seconds(self) -> float | None:
        """None for an answer of fewer than two tokens."""
        if self.ended_seconds is None or not self.chunk_seconds or self.completion_tokens < 2:
            return None
        return (self.ended_seconds - self.chunk_seconds[0]) / (self.completion_tokens - 1)

    def itl_seconds(self) -> list[float]:
        """The gaps between chunks; of an answer that was cut off also the stall still open."""
        gaps = [later - earlier for earlier, later in itertools.pairwise(self.chunk_seconds)]
        if self.is_cut_off and self.ended_seconds is not None and self.chunk_seconds:
            gaps.append(self.ended_seconds - self.chunk_seconds[-1])
        return gaps
