"""Who gets which share of each step: the idea is at the head of `Scheduler.schedule`.

A request waits or runs, both in the order of its rank (priority, arrival). It holds blocks exactly
while it runs. Blocks for all tokens it knows are taken when it is admitted, so a long prompt never
gets stuck half-way; from then on it grows by one block per `block_size` generated tokens.

When blocks run out, a running request takes those of the lowest rank (preemption): that one waits
again and later recomputes its tokens, mostly through the prefix cache. The lowest itself pauses
instead. So the first of the running always goes on, and one after the other all finish. A waiting
request preempts nobody, and is admitted only if every running one could still take a block: who
gets in stays for about `block_size` steps, so no two requests throw each other out in turns.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine_service.config import SchedulerConfig
from engine_service.errors import (
    ContextLengthExceeded,
    EngineError,
    InternalError,
    InvalidRequest,
    RequestIdInUse,
)
from engine_service.kv_cache_manager import KVCacheManager
from engine_service.messages import (
    CoreStats,
    Failure,
    Finish,
    FinishReason,
    PrefillChunk,
    RequestOutput,
    TokenLogprobs,
)
from engine_service.request import FINISHED_STATUS, Request, RequestKey, RequestStatus
from engine_service.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from engine_service.stop_check import check_stop


class Grammars(Protocol):
    """What the scheduler needs of the grammars; asked only about requests that have one."""

    def accept(self, key: RequestKey, token_id: int) -> None:
        """Advances the request's matcher; an EngineError fails that request."""

    def is_terminated(self, key: RequestKey) -> bool: ...

    def release(self, key: RequestKey) -> None:
        """The request has ended in `update_from_output`. (Who aborts or fails it, releases it.)"""


@dataclass(slots=True)
class _Step:
    """A step in the making."""

    token_budget: int  # left
    shares: list[ScheduledRequest] = field(default_factory=list)


class Scheduler:
    """Owns all requests of the engine core. Not thread-safe: one loop drives it."""

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        if config.max_num_batched_tokens < 1:
            raise InvalidRequest("must be at least 1", field="max_num_batched_tokens")
        if config.max_num_seqs < 1:
            raise InvalidRequest("must be at least 1", field="max_num_seqs")
        self._token_budget = config.max_num_batched_tokens
        self._max_num_seqs = config.max_num_seqs
        self._kv = kv_cache_manager

        self._requests: dict[str, dict[int, Request]] = {}  # the unfinished, by id and sample
        self._running: list[Request] = []  # by rank
        self._waiting: list[Request] = []  # by rank; WAITING and PREEMPTED
        self._num_waiting_for_grammar = 0

        self._num_added = 0
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_preemptions = 0

    # ------------------------------------------------------------ requests come and go

    def add_request(self, request: Request) -> None:
        """Takes it over, WAITING or WAITING_FOR_GRAMMAR. Raises an EngineError and keeps nothing
        if it can never run: the edge refuses such requests before."""
        if request.num_prompt_tokens == 0:
            raise InvalidRequest("must have at least one token", field="prompt")
        if request.num_prompt_tokens >= self._kv.capacity_tokens:
            raise ContextLengthExceeded(
                f"the prompt has {request.num_prompt_tokens} tokens, which leaves no room for one "
                f"more in a context of {self._kv.capacity_tokens}",
                field="prompt",
            )
        samples = self._requests.setdefault(request.request_id, {})
        if request.index in samples:
            raise RequestIdInUse(f"request id {request.request_id} is in use", field="request_id")
        samples[request.index] = request
        self._num_added += 1
        request.rank = (request.priority, request.arrival_ns, self._num_added)
        if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            self._num_waiting_for_grammar += 1
        else:
            insort(self._waiting, request, key=_rank)

    def grammar_ready(self, key: RequestKey, now_ns: int) -> None:
        """Its grammar is compiled; a request that is gone meanwhile is no error."""
        request = self._find(key)
        if request is not None and request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            request.status = RequestStatus.WAITING
            request.grammar_ready_ns = now_ns
            self._num_waiting_for_grammar -= 1
            insort(self._waiting, request, key=_rank)

    def abort(self, key: RequestKey, now_ns: int) -> RequestOutput | None:
        """Ends it at any time, also between schedule() and update; None if it is gone already."""
        return self._end_by_key(key, FinishReason.ABORT, now_ns)

    def fail(self, key: RequestKey, failure: Failure, now_ns: int) -> RequestOutput | None:
        """Like `abort`, but as an error."""
        return self._end_by_key(key, FinishReason.ERROR, now_ns, failure)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def has_schedulable_requests(self) -> bool:
        """Whether schedule() would find work: false also while all wait for grammars."""
        return bool(self._running or self._waiting)

    def keys_of(self, request_id: str) -> list[RequestKey]:
        """Of its unfinished samples."""
        return [request.key for request in self._requests.get(request_id, {}).values()]

    def stats(self) -> CoreStats:
        pool = self._kv.pool
        return CoreStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + self._num_waiting_for_grammar,
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            used_blocks=pool.num_used,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._kv.num_queried_tokens,
            prefix_cache_hits=self._kv.num_hit_tokens,
        )

    # ------------------------------------------------------------ schedule

    def schedule(self, now_ns: int) -> SchedulerOutput:
        """Hands out one step's budget of tokens so that computed tokens catch up with known ones.

            tokens   |<---- computed ---->|<- share ->|<-- later -->|
                     0     num_computed_tokens                 num_tokens

        There is no prefill phase and no decode phase. A share that reaches the end yields the next
        token; one that does not is a chunk of a longer prompt. First each running request that
        lacks only its last token gets it, so a stream never waits for another's prompt; then those
        that lack more share what is left; then waiting ones are admitted.
        """
        step = _Step(self._token_budget)
        unfinished_prefills = self._schedule_last_tokens(step)
        self._schedule_chunks(step, unfinished_prefills)
        self._admit_waiting(step, now_ns)
        if step.shares:
            self._num_steps += 1
        return SchedulerOutput(
            step_id=self._num_steps,
            scheduled=step.shares,
            num_scheduled_tokens=self._token_budget - step.token_budget,
        )

    def _schedule_last_tokens(self, step: _Step) -> list[Request]:
        """Returns the requests that lack more than one token.

        Today that is one at most: nobody is admitted while another's prompt takes all that is left.
        """
        unfinished_prefills: list[Request] = []
        for request in self._running.copy():
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for one before it
            if request.num_tokens - request.num_computed_tokens > 1:
                unfinished_prefills.append(request)
            elif self._grow(request):
                self._give(request, 1, step)
        return unfinished_prefills

    def _schedule_chunks(self, step: _Step, requests: list[Request]) -> None:
        for request in requests:
            num_missing = request.num_tokens - request.num_computed_tokens
            self._give(request, min(num_missing, step.token_budget), step)

    def _admit_waiting(self, step: _Step, now_ns: int) -> None:
        """In order, up to the first that does not fit: nobody is overtaken for being long.

        Budget is left only if every running request got its share, so there are never more of
        them than the budget has tokens, and each moves in every step.
        """
        while self._waiting and step.token_budget > 0 and len(self._running) < self._max_num_seqs:
            request = self._waiting[0]
            blocks, num_cached_tokens = self._kv.get_computed_blocks(request)
            num_missing = request.num_tokens - num_cached_tokens
            num_spare_blocks = len(self._running)
            if self._kv.allocate_slots(request, num_missing, blocks, num_spare_blocks) is None:
                break
            del self._waiting[0]
            insort(self._running, request, key=_rank)
            self._start(request, num_cached_tokens, now_ns)
            self._give(request, min(num_missing, step.token_budget), step)

    def _start(self, request: Request, num_cached_tokens: int, now_ns: int) -> None:
        if request.status is RequestStatus.WAITING:  # not PREEMPTED: it comes for the first time
            request.first_scheduled_ns = now_ns
            request.first_step_id = self._num_steps + 1
            request.num_cached_tokens = num_cached_tokens
        num_prefilled = min(num_cached_tokens, request.num_prompt_tokens)
        request.num_prefilled_tokens = max(request.num_prefilled_tokens, num_prefilled)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_cached_tokens
        request.num_admitted_tokens = request.num_tokens

    def _give(self, request: Request, num_tokens: int, step: _Step) -> None:
        block_ids = self._kv.block_ids(request)
        share = ScheduledRequest(request, request.num_computed_tokens, num_tokens, block_ids)
        step.shares.append(share)
        step.token_budget -= num_tokens

    def _grow(self, request: Request) -> bool:
        """Room for its next token, at the cost of those after it; False if there are none."""
        while self._kv.allocate_slots(request, 1) is None:
            last = self._running[-1]
            if last is request:
                return False  # it keeps its blocks: nobody before it has asked for them
            self._preempt(last)
        return True

    def _preempt(self, request: Request) -> None:
        """Back to its place in the queue; its output stays, its KV has to be computed again."""
        self._kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        _remove(self._running, request)
        insort(self._waiting, request, key=_rank)

    # ------------------------------------------------------------ update

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        runner_output: ModelRunnerOutput,
        start_ns: int,
        end_ns: int,
        grammars: Grammars,
    ) -> list[RequestOutput]:
        """Books what the step computed; one output per request that has something to tell."""
        outputs = []
        for share in scheduler_output.scheduled:
            request = share.request
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted while the step ran
            failure = runner_output.failures.get(request.key)
            if failure is None and share.samples:
                failure = _accept_token(request, runner_output, grammars)
            if failure is not None:  # nothing is published: the KV of this step is in doubt
                finish = self._end(request, FinishReason.ERROR, end_ns, failure)
                outputs.append(_output(request, finish=finish))
            else:
                num_prefilled = self._advance(share, scheduler_output.step_id, start_ns, end_ns)
                if share.samples:
                    token = self._append(request, runner_output, num_prefilled, end_ns, grammars)
                    outputs.append(token)
                elif num_prefilled is not None:
                    outputs.append(_output(request, num_prefilled))
            if request.structured_output is not None and request.status.is_finished:
                grammars.release(request.key)
        return outputs

    def _advance(
        self, share: ScheduledRequest, step_id: int, start_ns: int, end_ns: int
    ) -> int | None:
        """Books the computed tokens; returns how far the prompt is now, if further than ever."""
        request = share.request
        request.num_computed_tokens += share.num_scheduled_tokens
        self._kv.cache_blocks(request, request.num_computed_tokens)
        if share.num_computed_tokens >= request.num_admitted_tokens:
            return None  # a generated token
        request.prefill_chunks.append(
            PrefillChunk(step_id, start_ns, end_ns, share.num_scheduled_tokens)
        )
        num_prefilled = min(request.num_computed_tokens, request.num_prompt_tokens)
        if num_prefilled <= request.num_prefilled_tokens:
            return None  # computed again after a preemption
        self._num_prompt_tokens += num_prefilled - request.num_prefilled_tokens
        request.num_prefilled_tokens = num_prefilled
        return num_prefilled

    def _append(
        self,
        request: Request,
        runner_output: ModelRunnerOutput,
        num_prefilled: int | None,
        end_ns: int,
        grammars: Grammars,
    ) -> RequestOutput:
        """Takes the sampled token and ends the request if that was its last."""
        token_id = runner_output.sampled_token_ids[request.key]
        logprobs = runner_output.logprobs.get(request.key)
        request.append_output(token_id)
        self._num_generated_tokens += 1
        if request.num_output_tokens == 1:
            request.first_token_ns = end_ns
        stop = check_stop(
            request,
            max_model_len=self._kv.capacity_tokens,
            grammar_is_terminated=(
                request.structured_output is not None and grammars.is_terminated(request.key)
            ),
        )
        finish = None
        if stop is not None:
            finish = self._end(request, stop.reason, end_ns, stop_token_id=stop.stop_token_id)
        return _output(request, num_prefilled, [token_id], logprobs, finish)

    # ------------------------------------------------------------ the end of a request

    def _find(self, key: RequestKey) -> Request | None:
        request_id, index = key
        return self._requests.get(request_id, {}).get(index)

    def _end_by_key(
        self, key: RequestKey, reason: FinishReason, now_ns: int, failure: Failure | None = None
    ) -> RequestOutput | None:
        request = self._find(key)
        if request is None:
            return None
        return _output(request, finish=self._end(request, reason, now_ns, failure))

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        now_ns: int,
        failure: Failure | None = None,
        stop_token_id: int | None = None,
    ) -> Finish:
        """The one way out, from any state: everything it holds is given back."""
        if request.status is RequestStatus.RUNNING:
            _remove(self._running, request)
            self._kv.free(request)
        elif request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            self._num_waiting_for_grammar -= 1
        else:
            _remove(self._waiting, request)
        samples = self._requests[request.request_id]
        del samples[request.index]
        if not samples:
            del self._requests[request.request_id]
        request.status = FINISHED_STATUS[reason]
        request.finished_ns = now_ns
        return Finish(reason, request.timing(), stop_token_id, failure)

    # ------------------------------------------------------------ proof

    def check_integrity(self) -> None:
        """Derives every invariant anew, blocks included; raises an InternalError if one is broken.

        Can be called at any time between two calls of the scheduler."""
        self._kv.check_integrity(self._running)
        live = [request for samples in self._requests.values() for request in samples.values()]
        for requests, states in (
            (self._running, {RequestStatus.RUNNING}),
            (self._waiting, {RequestStatus.WAITING, RequestStatus.PREEMPTED}),
        ):
            in_state = sorted((r for r in live if r.status in states), key=_rank)
            if requests != in_state:
                raise InternalError("a queue differs from the states of the requests")
        num_queued = len(self._running) + len(self._waiting) + self._num_waiting_for_grammar
        if num_queued != len(live):
            raise InternalError("a request is in no queue")
        if any(r.num_computed_tokens >= r.num_tokens for r in live):
            raise InternalError("a request has nothing left to compute")


def _rank(request: Request) -> tuple[int, int, int]:
    return request.rank


def _remove(requests: list[Request], request: Request) -> None:
    del requests[bisect_left(requests, request.rank, key=_rank)]


def _accept_token(
    request: Request, runner_output: ModelRunnerOutput, grammars: Grammars
) -> Failure | None:
    """Shows the sampled token to the request's grammar; what is wrong with it, if anything."""
    token_id = runner_output.sampled_token_ids.get(request.key)
    if token_id is None:
        return Failure(InternalError.reason, "the step yielded no token for this request")
    if request.structured_output is not None:
        try:
            grammars.accept(request.key, token_id)
        except EngineError as error:
            return Failure(error.reason, error.message, error.field)
    return None


def _output(
    request: Request,
    num_prefilled: int | None = None,
    token_ids: Sequence[int] = (),
    logprobs: TokenLogprobs | None = None,
    finish: Finish | None = None,
) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        index=request.index,
        new_token_ids=list(token_ids),
        new_logprobs=[] if logprobs is None else [logprobs],
        num_prefilled_tokens=num_prefilled,
        num_cached_tokens=request.num_cached_tokens,
        finish=finish,
    )
