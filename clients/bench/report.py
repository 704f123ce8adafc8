"""What a run is summed up to. The fields are those of the JSON; units are in their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clients.bench.answer import Answer
from clients.bench.distribution import Distribution
from clients.bench.person import is_valid_person
from clients.bench.workloads import Workload

_HEAVY_CLIENT_SHARE = 0.10  # of a core: above it the figures suffer on a shared machine
_MIN_JUDGED_SECONDS = 1.0  # a shorter run says little of it


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What was run; a part of the report."""

    workload: str  # w1 to w5, w5-base, w5-long (the long prompts of w5)
    concurrency: int
    seed: str
    address: str
    model: str


@dataclass(frozen=True, slots=True)
class Clock:
    wall_seconds: float
    client_cpu_seconds: float  # of this process: what the load generator itself cost


@dataclass(frozen=True, slots=True)
class FailureCount:
    count: int
    example: str  # the first one's message


@dataclass(frozen=True, slots=True)
class Report:
    run: RunInfo
    num_requests: int
    num_ok: int
    num_cut_off: int  # still going at the end: in a window that is no failure
    wall_seconds: float
    client_cpu_seconds: float
    client_cpu_share: float  # of one core
    output_tokens: int  # by the usage of those that are ok, as all tokens here
    output_tokens_per_second: float
    total_tokens_per_second: float  # prompts and output
    requests_per_second: float
    chunks_per_second: float  # of all requests, also those cut off
    prompt_tokens_mean: float | None
    output_tokens_min: int | None
    output_tokens_max: int | None
    cached_share: float | None  # of the prompt tokens; None: the server does not say
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    finish_reasons: dict[str, int]
    num_valid_of_stopped: int | None  # w4: of those that ended with `stop`
    failures: dict[str, FailureCount]  # by kind; cut-off requests are none

    @property
    def num_failed(self) -> int:
        return sum(failure.count for failure in self.failures.values())

    @property
    def has_heavy_client(self) -> bool:
        """Whether the load generator may have slowed down what it measured."""
        is_judged = self.wall_seconds >= _MIN_JUDGED_SECONDS
        return is_judged and self.client_cpu_share > _HEAVY_CLIENT_SHARE


def report_of(run: RunInfo, answers: Sequence[Answer], clock: Clock) -> Report:
    """`answers` are all that were begun; those still going have been cut off.

    Latencies are of the answers that are ok; in a window also of those that it cut off, whose
    stalls are what it is about.
    """
    ok = [answer for answer in answers if answer.is_ok]
    is_window = run.workload.startswith(Workload.W5.value)
    timed = [answer for answer in answers if answer.chunk_seconds] if is_window else ok
    output = [answer.completion_tokens for answer in ok]
    prompt_tokens = sum(answer.usage.prompt_tokens for answer in ok if answer.usage)
    is_w4 = run.workload == Workload.W4.value
    return Report(
        run=run,
        num_requests=len(answers),
        num_ok=len(ok),
        num_cut_off=sum(answer.is_cut_off for answer in answers),
        wall_seconds=clock.wall_seconds,
        client_cpu_seconds=clock.client_cpu_seconds,
        client_cpu_share=_rate(clock.client_cpu_seconds, clock),
        output_tokens=sum(output),
        output_tokens_per_second=_rate(sum(output), clock),
        total_tokens_per_second=_rate(sum(output) + prompt_tokens, clock),
        requests_per_second=_rate(len(ok), clock),
        chunks_per_second=_rate(sum(len(answer.chunk_seconds) for answer in answers), clock),
        prompt_tokens_mean=prompt_tokens / len(ok) if ok else None,
        output_tokens_min=min(output, default=None),
        output_tokens_max=max(output, default=None),
        cached_share=_cached_share(ok),
        ttft_ms=_milliseconds(answer.ttft_seconds for answer in timed),
        itl_ms=_milliseconds(gap for answer in timed for gap in answer.itl_seconds()),
        tpot_ms=_milliseconds(answer.tpot_seconds for answer in ok),
        e2e_ms=_milliseconds(answer.e2e_seconds for answer in ok),
        finish_reasons=_finish_reasons(ok),
        num_valid_of_stopped=_num_valid_of_stopped(ok) if is_w4 else None,
        failures=_failures(answers),
    )


def _rate(count: float, clock: Clock) -> float:
    return count / clock.wall_seconds if clock.wall_seconds else 0.0


def _milliseconds(seconds: Iterable[float | None]) -> Distribution | None:
    return Distribution.of(1e3 * value for value in seconds if value is not None)


def _cached_share(ok: Sequence[Answer]) -> float | None:
    """Of those prompts whose server says how much of them was cached."""
    usages = [answer.usage for answer in ok if answer.usage]
    known = [usage for usage in usages if usage.cached_tokens is not None]
    prompt_tokens = sum(usage.prompt_tokens for usage in known)
    if not prompt_tokens:
        return None
    return sum(usage.cached_tokens or 0 for usage in known) / prompt_tokens


def _finish_reasons(ok: Sequence[Answer]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for answer in ok:
        reason = answer.finish_reason or "none"
        counts[reason] = counts.get(reason, 0) + 1
    return counts


def _num_valid_of_stopped(ok: Sequence[Answer]) -> int:
    stopped = [answer for answer in ok if answer.finish_reason == "stop"]
    return sum(is_valid_person(answer.text) for answer in stopped)


def _failures(answers: Sequence[Answer]) -> dict[str, FailureCount]:
    counts: dict[str, FailureCount] = {}
    for answer in answers:
        if answer.failure is None or answer.is_cut_off:
            continue
        name = answer.failure.name
        known = counts.get(name)
        counts[name] = FailureCount(
            1 if known is None else known.count + 1,
            answer.failure.message if known is None else known.example,
        )
    return counts
