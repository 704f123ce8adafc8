"""Who gets which share of each step: the idea is at the head of `Scheduler.schedule`.

A request waits or runs (`request_queues`). It holds blocks exactly while it runs. Blocks for all
tokens it knows are taken when it is admitted, so a long prompt never gets stuck half-way; from
then on it grows by one block per `block_size` generated tokens.

**Order.** Running requests have a rank (`waiting_queue`): priority, against time waited. Who is
admitted next is decided between tenants by what each has had (`fair_share`), within a tenant by
place: rank, and how long its prompt takes. A request whose next prefix block another one is
computing waits for it aside, in nobody's way (`prefixes_in_flight`). When blocks run out, somebody
gives way (`preemption`). What a step came to is booked in `request_progress`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_service.config import SchedulerConfig
from engine_service.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest
from engine_service.kv_cache_manager import KVCacheManager
from engine_service.messages import (
    CoreStats,
    Failure,
    FinishReason,
    RequestOutput,
    WaitReason,
)
from engine_service.preemption import Preemption
from engine_service.prefill_pace import PrefillPace, StepRoom
from engine_service.queue_watch import QueueWatch
from engine_service.request import Request, RequestKey, RequestStatus
from engine_service.request_output import Grammars
from engine_service.request_progress import RequestProgress
from engine_service.request_queues import RequestQueues
from engine_service.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from engine_service.stop_check import will_be_cut

_DEADLINE = Failure(DeadlineExceeded.reason, "the request's deadline has passed")


@dataclass(slots=True)
class _Step:
    """A step in the making."""

    room: StepRoom
    now_ns: int
    shares: list[ScheduledRequest] = field(default_factory=list)


class Scheduler:
    """Owns all requests of the engine core. Not thread-safe: one loop drives it."""

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        if config.max_num_batched_tokens < 1:
            raise InvalidRequest("must be at least 1", field="max_num_batched_tokens")
        if config.max_num_seqs < 1:
            raise InvalidRequest("must be at least 1", field="max_num_seqs")
        self.token_budget = config.max_num_batched_tokens  # of a step
        self._max_num_running = config.max_num_running
        self._kv = kv_cache_manager
        self._queues = RequestQueues(config, kv_cache_manager)
        self._preemption = Preemption(kv_cache_manager, self._queues, self._max_num_running)
        self._pace = PrefillPace(config)
        self.watch = QueueWatch(self._queues.in_flight.is_following)
        self._progress = RequestProgress(
            self._queues,
            self.watch,
            max_model_len=kv_cache_manager.capacity_tokens,
            # All that a step adds to what a request knows: it takes one more block at most.
            max_new_tokens=kv_cache_manager.block_size if config.enable_jump_forward else 1,
        )
        self._num_steps = 0

    # ------------------------------------------------------------ requests come and go

    def add_request(
        self, request: Request, *, is_watched: bool = False, wants_steps: bool = False
    ) -> None:
        """Takes it over, WAITING or WAITING_FOR_GRAMMAR. Raises an EngineError and keeps nothing
        if it can never run: the edge refuses such requests before.

        `is_watched`: why it waits is noted, from `taken_ns` to its first token; `wants_steps`: the
        steps that it waits for, or is computed in, are to be recorded."""
        if request.num_prompt_tokens == 0:
            raise InvalidRequest("must have at least one token", field="prompt")
        if request.num_prompt_tokens >= self._kv.capacity_tokens:
            raise ContextLengthExceeded(
                f"the prompt has {request.num_prompt_tokens} tokens, which leaves no room for one "
                f"more in a context of {self._kv.capacity_tokens}",
                field="prompt",
            )
        num_cached = self._kv.get_computed_blocks(request).num_tokens
        prefill_ns = self._pace.prefill_ns(num_cached, request.num_tokens - num_cached)
        self._queues.add(request, prefill_ns)
        if is_watched:
            self.watch.add(request, request.taken_ns, wants_steps=wants_steps)

    def grammar_ready(self, key: RequestKey, now_ns: int) -> None:
        """Its grammar is compiled; a request that is gone meanwhile is no error."""
        request = self._queues.find(key)
        if request is not None and request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            request.grammar_ready_ns = now_ns
            self._queues.grammar_ready(request)

    def abort(self, key: RequestKey, now_ns: int) -> RequestOutput | None:
        """Ends it at any time, also between schedule() and update; None if it is gone already."""
        return self._end(key, FinishReason.ABORT, now_ns)

    def fail(self, key: RequestKey, failure: Failure, now_ns: int) -> RequestOutput | None:
        """Like `abort`, but as an error."""
        return self._end(key, FinishReason.ERROR, now_ns, failure)

    def expire(self, now_ns: int) -> list[RequestOutput]:
        """Ends what is past its deadline, running or not; to be called before each step."""
        outputs = []
        while (request := self._queues.deadlines.first_due(now_ns)) is not None:
            outputs.append(self._progress.end(request, FinishReason.ERROR, now_ns, _DEADLINE))
        return outputs

    def next_deadline_ns(self) -> int | None:
        """When `expire` will have something to do, as far as is known now."""
        return self._queues.deadlines.next_ns()

    def flush_prefix_cache(self) -> int:
        """Nothing computed so far is found any more; returns how many blocks could be."""
        return self._queues.flush_prefix_cache()

    def has_unfinished_requests(self) -> bool:
        return self._queues.has_requests

    def keys_of(self, request_id: str) -> list[RequestKey]:
        """Of its unfinished samples."""
        return self._queues.keys_of(request_id)

    @property
    def num_preemptions(self) -> int:
        return self._queues.num_preemptions

    def stats(self) -> CoreStats:
        pool = self._kv.pool
        return CoreStats(
            num_running=len(self._queues.running),
            num_waiting=self._queues.num_waiting,
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            used_blocks=pool.num_used,
            num_steps=self._num_steps,
            num_prompt_tokens=self._progress.num_prompt_tokens,
            num_generated_tokens=self._progress.num_generated_tokens,
            num_forced_tokens=self._progress.num_forced_tokens,
            num_preemptions=self._queues.num_preemptions,
            prefix_cache_queries=self._kv.num_queried_tokens,
            prefix_cache_hits=self._kv.num_hit_tokens,
        )

    def _end(
        self, key: RequestKey, reason: FinishReason, now_ns: int, failure: Failure | None = None
    ) -> RequestOutput | None:
        request = self._queues.find(key)
        return None if request is None else self._progress.end(request, reason, now_ns, failure)

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
        step = _Step(self._pace.new_step(), now_ns)
        self._preemption.yield_claimed_places(now_ns)
        unfinished_prefills = self._schedule_last_tokens(step)
        self._pace.keep(step.room, step.shares)
        for request in unfinished_prefills:
            self._admit_waiting(step, ahead_of=request)
            self._give_chunk(request, step)
        refusal = self._admit_waiting(step)
        self._settle(step)
        if self.watch:
            head = self._queues.waiting.head(now_ns)
            if refusal is WaitReason.NO_BUDGET and head is not None:
                refusal = self._refusal_beyond_budget(head)
            self.watch.note(now_ns, step.shares, refusal, head)
        if step.shares:
            self._num_steps += 1
        return SchedulerOutput(
            step_id=self._num_steps,
            scheduled=step.shares,
            num_scheduled_tokens=self.token_budget - step.room.token_budget,
            block_copies=self._kv.block_copies(),
            scheduled_ns=now_ns,
        )

    def _settle(self, step: _Step) -> None:
        served = {share.request for share in step.shares if share.samples}
        cut_short = {
            r.tenant for r in self._queues.running if r not in served and not self._needs_nothing(r)
        }
        self._queues.fair_share.settle(cut_short)

    def _schedule_last_tokens(self, step: _Step) -> list[Request]:
        """Returns the requests that lack more of a prompt, in the order of their turns.

        That is one, unless chunks are cut short or another tenant's turn came in between. Tokens
        that were generated without a step are computed with the last one, as far as the budget
        leaves one to each of those behind.
        """
        unfinished_prefills: list[Request] = []
        num_behind = len(self._queues.running)
        for request in self._queues.running.copy():
            num_behind -= 1
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for one before it
            if request.num_pending_outputs and self._needs_nothing(request):
                continue
            num_missing = request.num_expected_tokens - request.num_planned_tokens
            if num_missing > 1 and request.is_prefilling:
                unfinished_prefills.append(request)
                continue
            num_tokens = min(num_missing, step.room.token_budget - num_behind)
            if self._preemption.grow(request, num_tokens):
                step.room.token_budget -= num_tokens
                self._give(request, num_tokens, step)
        turn = self._queues.fair_share.turn
        return sorted(unfinished_prefills, key=lambda r: (r.priority, turn(r), r.place))

    def _needs_nothing(self, request: Request) -> bool:
        """The steps under way end it."""
        return will_be_cut(request, self._kv.capacity_tokens)

    def _give_chunk(self, request: Request, step: _Step) -> None:
        num_planned = request.num_planned_tokens
        num_tokens = step.room.chunk(num_planned, request.num_tokens - num_planned)
        if num_tokens > 0:
            step.room.take_chunk(num_planned, num_tokens)
            self._give(request, num_tokens, step)

    def _give(self, request: Request, num_tokens: int, step: _Step) -> None:
        block_ids = self._kv.block_ids(request)
        share = ScheduledRequest.of(request, request.num_planned_tokens, num_tokens, block_ids)
        step.shares.append(share)
        self._queues.fair_share.charge(request, num_tokens)

    # ------------------------------------------------------------ admission

    def _admit_waiting(self, step: _Step, ahead_of: Request | None = None) -> WaitReason:
        """In turn, up to the first that does not fit: nobody takes what that one waits for.

        `ahead_of` half of a prompt go those who are as urgent and whose tenant has had less, or
        whose place is before it.
        Returns why the next one waits; if none does, that means nothing.
        """
        queues = self._queues
        while len(queues.running) < self._max_num_running:
            if step.room.token_budget <= 0:
                return WaitReason.NO_BUDGET
            request = queues.waiting.head(step.now_ns)
            if request is None or not (ahead_of is None or self._is_ahead(request, ahead_of)):
                return WaitReason.TURN
            prefix = self._kv.get_computed_blocks(request)
            if queues.follow(request, prefix.num_tokens):
                continue
            num_missing = request.num_tokens - prefix.num_tokens
            if step.room.chunk(prefix.num_tokens, num_missing) == 0:
                return WaitReason.NO_BUDGET
            num_spare_blocks = len(queues.running)
            if self._kv.allocate_slots(request, num_missing, prefix, num_spare_blocks) is None:
                return WaitReason.NO_BLOCKS
            self._start(request, prefix.num_tokens, step.now_ns)
            self._give_chunk(request, step)
        return WaitReason.NO_SLOT

    def _refusal_beyond_budget(self, waiting: Request) -> WaitReason:
        """Why a larger budget would not have let it in; NO_BUDGET if it would have."""
        prefix = self._kv.get_computed_blocks(waiting)
        if self._queues.in_flight.leader_of(waiting, prefix.num_tokens) is not None:
            return WaitReason.PREFIX_IN_FLIGHT
        if self._preemption.num_missing_blocks(waiting, prefix) > 0:
            return WaitReason.NO_BLOCKS
        return WaitReason.NO_BUDGET

    def _is_ahead(self, waiting: Request, running: Request) -> bool:
        turn = self._queues.fair_share.turn
        return waiting.priority <= running.priority and (
            (turn(waiting), waiting.place) < (turn(running), running.place)
        )

    def _start(self, request: Request, num_cached_tokens: int, now_ns: int) -> None:
        if request.status is RequestStatus.WAITING:  # not PREEMPTED: it comes for the first time
            request.first_scheduled_ns = now_ns
            request.first_step_id = self._num_steps + 1
            request.num_cached_tokens = num_cached_tokens
        num_prefilled = min(num_cached_tokens, request.num_prompt_tokens)
        request.num_prefilled_tokens = max(request.num_prefilled_tokens, num_prefilled)
        self._queues.start(request, num_cached_tokens)

    # ------------------------------------------------------------ a step under way

    def launched(self, scheduler_output: SchedulerOutput) -> None:
        """The device has it; `update_from_output` comes when it is over. The next step may be
        planned before that, if `may_plan_after` it."""
        self._kv.copies_are_made()
        for share in scheduler_output.scheduled:
            share.request.num_in_flight_tokens += share.num_scheduled_tokens
            share.request.num_pending_outputs += share.samples

    def may_plan_after(self, under_way: SchedulerOutput) -> bool:
        """Before it is known what it yields."""
        return not any(
            share.samples and share.request.next_depends_on_last for share in under_way.scheduled
        )

    def shrink_steps(self, too_large: SchedulerOutput) -> int | None:
        """Steps have half as many tokens from now on as one that did not fit into memory, which was
        not launched; None: nobody could be given less."""
        token_budget = max(too_large.num_scheduled_tokens // 2, self._max_num_running)
        if token_budget >= too_large.num_scheduled_tokens:
            return None
        self.token_budget = self._pace.token_budget = token_budget
        return token_budget

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        runner_output: ModelRunnerOutput,
        start_ns: int,
        end_ns: int,
        grammars: Grammars,
    ) -> list[RequestOutput]:
        """Books what the step computed; one output per request that has something to tell."""
        self._pace.observe(scheduler_output.scheduled, (end_ns - start_ns) * 1e-9)
        return self._progress.update_from_output(
            scheduler_output, runner_output, start_ns, end_ns, grammars
        )

    def check_integrity(self) -> None:
        """Proves all books; raises an InternalError. At any time between two calls."""
        self._queues.check_integrity()
