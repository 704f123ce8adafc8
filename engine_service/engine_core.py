"""The step loop: the only thread that touches scheduler, KV cache, model and grammars.

Each iteration drains the mailbox, schedules, executes, updates and emits one frame. Commands are
taken in order and all before the step is scheduled, so that an abort always frees its blocks
first; aborts that arrive while the model runs are taken again before the update, so that a
sample nobody waits for emits nothing more.

What may fail, and what then ends:

    the model, in one step       the requests scheduled in it, each with a typed failure
    the model, in every step     the core: its device is broken, a new process may do better
    the bookkeeping              the core: what it says about blocks can't be trusted any more
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final, Protocol

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
from engine_service.scheduler_output import ModelRunnerOutput, SchedulerOutput
from engine_service.step_recorder import StepRecorder, StepStamps
from engine_service.token_lists import TokenLists
from engine_service.transport import CoreChannel

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS: Final = 1.0
MAX_FAILED_STEPS: Final = 8  # in a row


class Runner(Protocol):
    """What the core needs of a ModelRunner."""

    @property
    def num_blocks(self) -> int: ...

    def execute_model(
        self, scheduler_output: SchedulerOutput, token_bitmask: GrammarBitmask | None
    ) -> ModelRunnerOutput: ...


class CompiledGrammars(Grammars, Protocol):
    """What the core needs of a StructuredOutputManager, beyond what the scheduler does."""

    def submit(self, key: RequestKey, spec: StructuredOutput) -> None:
        """Starts to compile; never waits."""

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
        self._failed_steps = 0
        self._mask_ns = 0  # when the last step's grammar masks were filled
        self._last_step_id = 0
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
        outputs = self._take_commands(self._mailbox.drain()) + self._take_grammars()
        outputs += self._expire()
        scheduler_output = self._scheduler.schedule(time.monotonic_ns())
        if not scheduler_output.scheduled:
            if outputs:
                self._emit_idle(outputs)
            return False
        start_ns = time.monotonic_ns()
        runner_output = self._execute(scheduler_output)
        outputs += self._take_commands(self._mailbox.take_aborts())
        end_ns = time.monotonic_ns()
        outputs += self._scheduler.update_from_output(
            scheduler_output, runner_output, start_ns, end_ns, self._grammars
        )
        self._recorder.step_done(
            StepStamps(drained_ns, start_ns, max(self._mask_ns, start_ns), end_ns),
            scheduler_output,
            runner_output,
        )
        self._emit(scheduler_output, start_ns, end_ns, outputs)
        return True

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
                self._grammars.submit(request.key, command.structured_output)
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

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Raises CoreBroken only; any other failure becomes that of the scheduled requests."""
        sampling = [item.request for item in scheduler_output.scheduled if item.samples]
        try:
            bitmask = self._grammars.fill_bitmask(sampling)
            self._mask_ns = time.monotonic_ns()
            runner_output = self._runner.execute_model(scheduler_output, bitmask)
        except Exception as error:
            self._failed_steps += 1
            keys = [item.request.key for item in scheduler_output.scheduled]
            logger.exception("step %d failed for %s", scheduler_output.step_id, keys)
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise CoreBroken(f"{self._failed_steps} steps in a row failed") from error
            return _all_failed(keys, _failure_of(error))
        self._failed_steps = 0
        return runner_output

    # ------------------------------------------------------------ frames

    def _emit(
        self,
        scheduler_output: SchedulerOutput,
        start_ns: int,
        end_ns: int,
        outputs: list[RequestOutput],
    ) -> None:
        self._last_step_id = scheduler_output.step_id
        self._channel.send(
            StepFrame(
                step_id=scheduler_output.step_id,
                start_ns=start_ns,
                end_ns=end_ns,
                num_scheduled_tokens=scheduler_output.num_scheduled_tokens,
                outputs=outputs,
                stats=self._scheduler.stats(),
                records=self._recorder.take(),
                grammar_compile_times_ns=self._grammars.take_compile_times_ns(),
            )
        )

    def _emit_idle(self, outputs: list[RequestOutput]) -> None:
        """A frame that no step made: a heartbeat, or news of requests that never ran."""
        now_ns = time.monotonic_ns()
        self._channel.send(
            StepFrame(
                step_id=self._last_step_id,
                start_ns=now_ns,
                end_ns=now_ns,
                num_scheduled_tokens=0,
                outputs=outputs,
                stats=self._scheduler.stats(),
                records=self._recorder.take(),
                grammar_compile_times_ns=self._grammars.take_compile_times_ns(),
            )
        )

    def _rest(self) -> None:
        """Nothing can be computed: nobody is here, or all wait for their grammars."""
        if self._check_integrity:
            self._scheduler.check_integrity()
        if not self._mailbox.wait(self._seconds_to_rest()):
            self._recorder.idle()
            self._emit_idle([])
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


def _all_failed(keys: list[RequestKey], failure: Failure) -> ModelRunnerOutput:
    return ModelRunnerOutput(sampled_token_ids={}, failures=dict.fromkeys(keys, failure))


def _failure_of(error: Exception) -> Failure:
    if _is_out_of_memory(error):
        return Failure("OUT_OF_MEMORY", "the device ran out of memory in this request's step")
    return Failure("INTERNAL_ERROR", "the step that computed this request failed")


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch's CPU allocator has no exception type of its own.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
