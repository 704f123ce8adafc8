"""The step loop: the only thread that touches scheduler, KV cache, model and grammars.

Each iteration drains the mailbox, schedules, executes, updates and emits one frame. Commands are
taken in order and all before the step is scheduled, so that an abort always frees its blocks
first; aborts that arrive while the model runs are taken again before the update, so that a
sample nobody waits for emits nothing more.

A device that computes beside the host never waits for it: to execute a step is then to launch it,
and to wait for the one before. What a step needs of the one before is on the device already.

    host      | plan 1 | plan 2 |   wait   | update 1, plan 3 |  wait  | update 2, plan 4 |
    device             |      step 1       |         step 2            |       step 3

What may fail, and what then ends:

    memory, for one step         nothing: it is planned anew with fewer tokens; at the least, one
                                 request
    the model, in one step       the requests scheduled in it, each with a typed failure
    the model, in every step     the core: its device is broken, a new process may do better
    the bookkeeping              the core: what it says about blocks can't be trusted any more
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import torch

from engine_service.config import CoreConfig
from engine_service.errors import EngineError
from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.kv_cache_manager import KVCacheManager
from engine_service.messages import (
    AbortRequest,
    AddRequest,
    Command,
    Failure,
    Finish,
    FinishReason,
    FlushPrefixCache,
    PrefixCacheFlushed,
    RequestOutput,
    StepFrame,
    StructuredOutput,
)
from engine_service.request import Request, RequestKey, RequestStatus
from engine_service.request_output import Grammars
from engine_service.scheduler import Scheduler
from engine_service.scheduler_output import (
    ModelRunnerOutput,
    SchedulerOutput,
    StepDone,
    StepUnderWay,
)
from engine_service.step_recorder import StepRecorder, StepStamps
from engine_service.token_lists import TokenLists
from engine_service.transport import CoreChannel

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS: Final = 1.0
MAX_FAILED_STEPS: Final = 8  # in a row
_NO_MEMORY: Final = Failure("OUT_OF_MEMORY", "the device ran out of memory in this request's step")
# How those say it that have no exception type for it: all but torch's allocator on CUDA.
_NO_MEMORY_WORDS: Final = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")
_STEP_FAILED: Final = Failure("INTERNAL_ERROR", "the step that computed this request failed")


class Runner(Protocol):
    """What the core needs of a ModelRunner."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def overlaps(self) -> bool:
        """Whether the device computes beside the host, so that steps are planned ahead."""

    def launch(
        self, scheduler_output: SchedulerOutput, token_bitmask: GrammarBitmask | None
    ) -> StepUnderWay:
        """Where the memory does not suffice, nothing is computed and it can be called again."""


class CompiledGrammars(Grammars, Protocol):
    """What the core needs of a StructuredOutputManager, beyond what the scheduler does."""

    def submit(self, key: RequestKey, spec: StructuredOutput) -> bool:
        """Starts to compile, unless it is there already, which it returns; never waits."""

    def poll(self) -> list[tuple[RequestKey, Failure | None]]:
        """What was compiled since, or failed to."""

    def fill_bitmask(self, sampling: Sequence[Request]) -> GrammarBitmask | None:
        """`sampling`: the requests that sample in this step, in scheduled order."""

    def take_compile_times_ns(self) -> list[int]:
        """How long each compilation took that ended since the last call."""

    def prepare(self) -> None:
        """The core is idle: what the first grammar needs may be loaded, beside."""

    def close(self) -> None:
        """The core ends."""


class CoreBroken(Exception):
    """Step after step raises; whatever is wrong doesn't go away by failing requests."""


class _Launched(NamedTuple):
    plan: SchedulerOutput
    step: StepUnderWay
    drained_ns: int
    launched_ns: int
    mask_ns: int  # when its grammar masks were filled


class EngineCore:
    def __init__(
        self,
        config: CoreConfig,
        channel: CoreChannel,
        runner: Runner,
        grammars: CompiledGrammars,
    ) -> None:
        self._channel = channel
        self._mailbox = channel.mailbox
        self._runner = runner
        self._grammars = grammars
        kv_cache_manager = KVCacheManager(
            block_size=config.cache.block_size,
            num_blocks=runner.num_blocks,
            enable_caching=config.cache.enable_prefix_caching,
        )
        self._scheduler = Scheduler(config.scheduler, kv_cache_manager)
        self._check_integrity = config.check_integrity
        self._under_way: deque[_Launched] = deque()
        self._num_ahead = 1 if runner.overlaps else 0  # steps, while the next one is planned
        self._outputs: list[RequestOutput] = []  # of the frame to come
        self._failed_steps = 0
        self._last_step_id = 0
        self._last_end_ns = 0
        self._recorder = StepRecorder(self._scheduler)
        self._stopping = False

    def run(self) -> None:
        """Steps until Shutdown comes or the actor is gone. Sleeps when there is nothing to do."""
        try:
            while not (self._stopping or self._mailbox.closed):
                if not self.step() and not self._stopping:
                    self._rest()
        finally:
            self.close()

    def close(self) -> None:
        """Ends what runs beside the loop; `run` does it by itself."""
        self._grammars.close()

    def step(self) -> bool:
        """Drain the mailbox, schedule, execute, update, emit; False: nothing to compute."""
        drained_ns = time.monotonic_ns()
        self._outputs += self._take_commands(self._mailbox.drain())
        self._outputs += self._take_grammars()
        self._outputs += self._expire()
        if self._under_way and not self._scheduler.may_plan_after(self._under_way[-1].plan):
            self._finish_all_but(0)
        plan = self._scheduler.schedule(time.monotonic_ns())
        has_work = bool(plan.scheduled or self._under_way)
        if plan.scheduled:
            self._launch(plan, drained_ns)
        self._finish_all_but(self._num_ahead if plan.scheduled else 0)
        if self._outputs:
            self._emit_idle()
        return has_work

    # ------------------------------------------------------------ commands

    def _take_commands(self, commands: Sequence[Command]) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for command in commands:
            if isinstance(command, AddRequest):
                outputs += self._add(command)
            elif isinstance(command, AbortRequest):
                outputs += self._abort(command)
            elif isinstance(command, FlushPrefixCache):
                num_blocks = self._scheduler.flush_prefix_cache()
                self._channel.send(PrefixCacheFlushed(num_blocks, self._scheduler.stats()))
            else:
                self._stopping = True
        return outputs

    def _add(self, command: AddRequest) -> list[RequestOutput]:
        """The edge refuses what can't run; should it err, the request fails and nothing else."""
        outputs: list[RequestOutput] = []
        lists = TokenLists.of(command.sampling, command.stopping)
        is_watched = command.is_traced or command.tells_timing
        if command.is_traced:
            self._recorder.traced_request_came(command.arrival_ns)
        for index in range(command.n):
            request = _request_of(command, index, lists)
            try:
                self._scheduler.add_request(
                    request, is_watched=is_watched, wants_steps=command.is_traced
                )
            except EngineError as error:
                request.finished_ns = time.monotonic_ns()
                failure = Failure(error.reason, error.message, error.field)
                finish = Finish(FinishReason.ERROR, request.timing(), failure=failure)
                outputs.append(RequestOutput(request.request_id, index, finish=finish))
                continue
            if command.structured_output is not None:
                request.grammar_was_cached = self._grammars.submit(
                    request.key, command.structured_output
                )
        return outputs

    def _abort(self, command: AbortRequest) -> list[RequestOutput]:
        now_ns = time.monotonic_ns()
        outputs: list[RequestOutput] = []
        for key in self._scheduler.keys_of(command.request_id):
            if command.indices and key[1] not in command.indices:
                continue
            output = self._scheduler.abort(key, now_ns)
            self._grammars.release(key)
            if output is not None:
                outputs.append(output)
        return outputs

    def _take_grammars(self) -> list[RequestOutput]:
        """Compilations that ended: their requests may run, or fail for a bad grammar."""
        now_ns = time.monotonic_ns()
        outputs: list[RequestOutput] = []
        for key, failure in self._grammars.poll():
            if failure is None:
                self._scheduler.grammar_ready(key, now_ns)
                continue
            output = self._scheduler.fail(key, failure, now_ns)
            self._grammars.release(key)
            if output is not None:
                outputs.append(output)
        return outputs

    def _expire(self) -> list[RequestOutput]:
        outputs = self._scheduler.expire(time.monotonic_ns())
        for output in outputs:
            self._grammars.release((output.request_id, output.index))
        return outputs

    # ------------------------------------------------------------ the model

    def _launch(self, plan: SchedulerOutput, drained_ns: int) -> None:
        """Raises CoreBroken only; any other failure becomes that of the scheduled requests."""
        launched_ns = time.monotonic_ns()
        mask_ns = 0
        step: StepUnderWay
        try:
            bitmask = self._grammars.fill_bitmask(plan.sampling_requests)
            mask_ns = time.monotonic_ns()
            step = self._runner.launch(plan, bitmask)
        except Exception as error:
            if _is_out_of_memory(error):
                self._out_of_memory(plan, error)
                return
            step = StepDone(self._failed(plan, error))
        self._scheduler.launched(plan)
        self._under_way.append(_Launched(plan, step, drained_ns, launched_ns, mask_ns))
        if isinstance(step, StepDone):  # there is nothing to wait for, nor to plan the next one on
            self._finish_all_but(0)

    def _finish_all_but(self, num_ahead: int) -> None:
        while len(self._under_way) > num_ahead:
            self._finish(self._under_way.popleft())

    def _finish(self, launched: _Launched) -> None:
        """Waits, updates, emits. Raises as `_launch`."""
        plan = launched.plan
        try:
            runner_output = launched.step.wait()
        except Exception as error:
            runner_output = self._failed(plan, error)
        if len(runner_output.failures) < len(plan.scheduled):
            self._failed_steps = 0
        self._outputs += self._take_commands(self._mailbox.take_aborts())
        end_ns = time.monotonic_ns()
        start_ns = max(launched.launched_ns, self._last_end_ns)
        self._last_end_ns = end_ns
        self._outputs += self._scheduler.update_from_output(
            plan, runner_output, start_ns, end_ns, self._grammars
        )
        self._recorder.step_done(
            StepStamps(launched.drained_ns, start_ns, max(launched.mask_ns, start_ns), end_ns),
            plan,
            runner_output,
        )
        self._last_step_id = plan.step_id
        self._emit(start_ns, end_ns, plan.num_scheduled_tokens)

    def _out_of_memory(self, plan: SchedulerOutput, error: Exception) -> None:
        """Nothing was launched. Steps of fewer tokens need less; where there is no smaller one, the
        request with most of it ends."""
        token_budget = self._scheduler.shrink_steps(plan)
        if token_budget is not None:
            num_tokens = plan.num_scheduled_tokens
            logger.warning("no memory for %d tokens: steps have %d now", num_tokens, token_budget)
            return
        largest = max(reversed(plan.scheduled), key=lambda share: share.num_scheduled_tokens)
        self._count_failure(plan, [largest.request.key], error)
        output = self._scheduler.fail(largest.request.key, _NO_MEMORY, time.monotonic_ns())
        self._grammars.release(largest.request.key)
        if output is not None:
            self._outputs.append(output)

    def _failed(self, plan: SchedulerOutput, error: Exception) -> ModelRunnerOutput:
        keys = [item.request.key for item in plan.scheduled]
        self._count_failure(plan, keys, error)
        failure = _NO_MEMORY if _is_out_of_memory(error) else _STEP_FAILED
        return ModelRunnerOutput({}, failures=dict.fromkeys(keys, failure))

    def _count_failure(
        self, plan: SchedulerOutput, keys: list[RequestKey], error: Exception
    ) -> None:
        """Of those requests. Raises CoreBroken if it is one too many."""
        self._failed_steps += 1
        logger.error("step %d failed for %s", plan.step_id, keys, exc_info=error)
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise CoreBroken(f"{self._failed_steps} steps in a row failed") from error

    # ------------------------------------------------------------ frames

    def _emit(self, start_ns: int, end_ns: int, num_scheduled_tokens: int) -> None:
        outputs, self._outputs = self._outputs, []
        self._channel.send(
            StepFrame(
                step_id=self._last_step_id,
                start_ns=start_ns,
                end_ns=end_ns,
                num_scheduled_tokens=num_scheduled_tokens,
                outputs=outputs,
                stats=self._scheduler.stats(),
                records=self._recorder.take(),
                grammar_compile_times_ns=self._grammars.take_compile_times_ns(),
            )
        )

    def _emit_idle(self) -> None:
        """A frame that no step made: a heartbeat, or news of requests that never ran."""
        now_ns = time.monotonic_ns()
        self._emit(now_ns, now_ns, 0)

    def _rest(self) -> None:
        """Nothing can be computed: nobody is here, or all wait for their grammars."""
        if self._check_integrity:
            self._scheduler.check_integrity()
        if not self._mailbox.wait(self._seconds_to_rest()):
            self._recorder.idle()
            self._emit_idle()
            self._grammars.prepare()

    def _seconds_to_rest(self) -> float:
        """To the next heartbeat, or to a deadline that comes before."""
        deadline_ns = self._scheduler.next_deadline_ns()
        if deadline_ns is None:
            return HEARTBEAT_SECONDS
        return min(HEARTBEAT_SECONDS, max(deadline_ns - time.monotonic_ns(), 0) * 1e-9)


def _request_of(command: AddRequest, index: int, lists: TokenLists) -> Request:
    waits_for_grammar = command.structured_output is not None
    return Request(
        request_id=command.request_id,
        index=index,
        prompt_token_ids=command.prompt_token_ids,
        sampling=command.sampling,
        stopping=command.stopping,
        structured_output=command.structured_output,
        priority=command.priority,
        tenant=command.tenant,
        cache_salt=command.cache_salt,
        arrival_ns=command.arrival_ns,
        deadline_ns=command.deadline_ns,
        shared_lists=lists,
        taken_ns=time.monotonic_ns(),
        tells_timing=command.tells_timing,
        status=RequestStatus.WAITING_FOR_GRAMMAR if waits_for_grammar else RequestStatus.WAITING,
    )


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in _NO_MEMORY_WORDS
    )
