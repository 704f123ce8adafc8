"""The owner of the engine service's state: which requests live, and what the core last said.

    servicer --submit, abort--> actor --commands, one frame a loop iteration--> core
    servicer <--- RequestStream ---- actor <----------- one frame a step ------ core

Everything here runs on the event loop and never waits. A live request leaves the table only when
the core has acknowledged the end of each of its samples, or has died: until then its id is taken
and its samples count, whether or not a reader is still there.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque

import msgspec

from engine_service.admission import Admission
from engine_service.config import SchedulerConfig
from engine_service.errors import (
    ERRORS_BY_REASON,
    DeadlineExceeded,
    EngineError,
    EngineUnavailable,
    InternalError,
    RequestIdInUse,
)
from engine_service.live_request import LiveRequest, RequestObserver, RequestStream, Sample
from engine_service.messages import (
    AbortRequest,
    AddRequest,
    Command,
    CoreStats,
    Failure,
    Finish,
    FinishReason,
    FlushPrefixCache,
    PrefixCacheFlushed,
    Ready,
    RequestOutput,
    Shutdown,
    StepFrame,
)
from engine_service.service_metrics import ServiceMetrics
from engine_service.step_spans import StepSpans
from engine_service.transport import CoreConnection

_NANO = 1e-9
_DEADLINE_SLACK_NS = 50_000_000  # the caller's clock starts before its call arrives here

_EXPIRED = Failure(DeadlineExceeded.reason, "the deadline passed")


class EngineActor:
    def __init__(
        self, limits: SchedulerConfig, metrics: ServiceMetrics, stall_timeout_seconds: float
    ) -> None:
        self.stats = CoreStats()
        self._state_change = asyncio.Event()
        self._metrics = metrics
        self.step_spans = StepSpans()
        self._stall_timeout_seconds = stall_timeout_seconds
        self._queue_timeout_seconds = limits.queue_timeout_seconds
        self._admission = Admission(
            limits.max_num_queued_reqs,
            limits.max_num_queued_tokens,
            math.inf if limits.max_queue_wait_seconds is None else limits.max_queue_wait_seconds,
        )
        self._live: dict[str, LiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._connection: CoreConnection | None = None
        self._commands: list[Command] = []  # of this loop iteration
        self._flushes: deque[asyncio.Future[int]] = deque()  # asked for, in order
        self._last_frame_ns = 0
        self._draining = False
        self._retry_after_seconds: float | None = None
        metrics.watch_core(lambda: self.stats)

    # ------------------------------------------------------------ for the servicer

    @property
    def next_state_change(self) -> asyncio.Event:
        """Set when `unavailable` may next have another answer, unless the core falls silent."""
        return self._state_change

    @property
    def num_requests(self) -> int:
        return len(self._live)

    def unavailable(self) -> EngineUnavailable | None:
        """Why nothing can be served now."""
        if self._draining:
            return EngineUnavailable("the engine is shutting down")
        if self._connection is None:
            return EngineUnavailable(
                "the engine core is not running yet",
                retry_after_seconds=self._retry_after_seconds,
            )
        silence_seconds = (time.monotonic_ns() - self._last_frame_ns) * _NANO
        if silence_seconds > self._stall_timeout_seconds:
            return EngineUnavailable(
                "the engine core does not respond", retry_after_seconds=self._stall_timeout_seconds
            )
        return None

    def check_available(self) -> None:
        if error := self.unavailable():
            raise error

    def check_admits(self) -> None:
        """`check_available` for a generation: where it raises, one was refused."""
        if error := self.unavailable():
            self.refused(error)
            raise error

    def refused(self, error: EngineError) -> None:
        """Told of each generation that was turned away before `submit`, which tells itself."""
        self._metrics.rejected(error)

    def submit(
        self, request: AddRequest, observer: RequestObserver, *, attempt: int | None = None
    ) -> RequestStream:
        """Admits a validated request. Raises an EngineError and keeps nothing if it may not run.
        `attempt`: 1 for the first, 2 after one refusal; None: not known."""
        try:
            self.check_available()
            if request.request_id in self._live:
                raise RequestIdInUse(
                    f"request id {request.request_id} is in use", field="request_id"
                )
            self._admission.enter(
                request.n,
                len(request.prompt_token_ids),
                time.monotonic(),
                patience_seconds=self._patience_seconds(request),
                attempt=attempt,
            )
        except EngineError as error:
            self.refused(error)
            raise
        samples = [Sample() for _ in range(request.n)]
        live = LiveRequest(request, samples, observer)
        self._live[request.request_id] = live
        if self._queue_timeout_seconds is not None:
            loop = asyncio.get_running_loop()
            live.queue_timer = loop.call_later(self._queue_timeout_seconds, self._expire, live)
        self._idle.clear()
        self._post(request)
        return RequestStream(live, self.leave)

    def abort(
        self, request_id: str, indices: tuple[int, ...] = (), tenant: str | None = None
    ) -> None:
        """Asks the core to end samples; what is unknown or finished is left alone, and what isn't
        the tenant's, where one is given."""
        live = self._live.get(request_id)
        if live is None or tenant not in (None, live.request.tenant):
            return
        wanted = indices or range(live.request.n)
        if any(not live.samples[i].is_finished for i in wanted if i < live.request.n):
            self._post(AbortRequest(request_id, indices))

    def leave(self, live: LiveRequest) -> None:
        live.has_reader = False
        deadline_ns = live.request.deadline_ns
        if deadline_ns and time.monotonic_ns() > deadline_ns - _DEADLINE_SLACK_NS:
            live.is_expired = True
        request_id = live.request.request_id
        if self._live.get(request_id) is live:  # it may have ended, and its id be in use again
            live.left_ns = time.monotonic_ns()
            self.abort(request_id)

    async def flush_prefix_cache(self) -> int:
        """The number of blocks that held a cached prefix. Raises EngineUnavailable."""
        self.check_available()
        flushed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._flushes.append(flushed)
        self._post(FlushPrefixCache())
        return await flushed

    # ------------------------------------------------------------ for the supervisor

    def core_started(self, connection: CoreConnection, ready: Ready) -> None:
        self._connection = connection
        self._last_frame_ns = time.monotonic_ns()
        self.stats = CoreStats(total_blocks=ready.num_blocks, free_blocks=ready.num_blocks)
        self._tell_state_change()

    def core_lost(self, retry_after_seconds: float | None) -> None:
        """Fails every live request: whatever the core knew of them is gone."""
        self._connection = None
        self._retry_after_seconds = retry_after_seconds
        self._commands.clear()
        self.stats = CoreStats()
        self.fail_all(
            EngineUnavailable("the engine core died", retry_after_seconds=retry_after_seconds)
        )
        self._tell_state_change()

    def handle(self, frame: StepFrame) -> None:
        self._last_frame_ns = time.monotonic_ns()
        self.stats = frame.stats
        self._metrics.step(frame.num_scheduled_tokens)
        self._metrics.grammars_compiled(frame.grammar_compile_times_ns)
        self.step_spans.add(frame.records)
        for output in frame.outputs:
            live = self._live.get(output.request_id)
            if live is not None:
                self._deliver(live, output, frame.end_ns)

    def prefix_cache_flushed(self, frame: PrefixCacheFlushed) -> None:
        self.stats = frame.stats
        if not self._flushes:  # all were failed before; none has been asked for since
            return
        flushed = self._flushes.popleft()
        if not flushed.done():  # cancelled: nobody waits for it any more
            flushed.set_result(frame.num_blocks)

    # ------------------------------------------------------------ for the end of the service

    def drain(self) -> None:
        """From now on nothing is admitted; what lives goes on."""
        self._draining = True
        self._tell_state_change()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def fail_all(self, error: EngineUnavailable) -> None:
        """Ends every live request at once; no word from the core is awaited."""
        for live in list(self._live.values()):
            live.collector.fail(error)
            for index, sample in enumerate(live.samples):
                if not sample.is_finished:
                    self._metrics.sample_lost(FinishReason.ERROR)
                    live.observer.sample_lost(index)
            self._forget(live)
        self._admission.reset(time.monotonic())
        while self._flushes:
            flushed = self._flushes.popleft()
            if not flushed.done():
                flushed.set_exception(error)

    def shut_down_core(self) -> bool:
        """False: there is no core that could be asked to leave."""
        if self._connection is None:
            return False
        self._commands.append(Shutdown())
        self._flush()
        return True

    def _tell_state_change(self) -> None:
        changed, self._state_change = self._state_change, asyncio.Event()
        changed.set()

    # ------------------------------------------------------------ outputs

    def _deliver(self, live: LiveRequest, output: RequestOutput, end_ns: int) -> None:
        sample = live.samples[output.index]
        if sample.is_finished:
            return
        started = output.num_prefilled_tokens is not None or bool(output.new_token_ids)
        was_queued = sample.is_queued and not started
        if sample.is_queued and (started or output.finish is not None):
            sample.is_queued = False
            self._leave_queue(live, scheduled=started)
            if started and live.queue_timer is not None:
                live.queue_timer.cancel()
        if output.new_token_ids:
            if sample.num_output_tokens == 0:
                live.observer.first_token(output.index, end_ns, self._last_frame_ns)
            self._count_tokens(live.request, sample, len(output.new_token_ids), end_ns)
        failure = output.finish.failure if output.finish is not None else None
        if failure is not None:
            live.collector.fail(_error_of(failure))
        elif live.has_reader:
            live.collector.put(output)
        if output.finish is not None:
            if not was_queued:
                self._admission.freed()
            self._finish_sample(live, output.index, output.finish)

    def _leave_queue(self, live: LiveRequest, *, scheduled: bool) -> None:
        num_tokens = len(live.request.prompt_token_ids)
        self._admission.leave(num_tokens, time.monotonic(), scheduled=scheduled)

    def _count_tokens(
        self, request: AddRequest, sample: Sample, num_tokens: int, end_ns: int
    ) -> None:
        if sample.num_output_tokens == 0:
            self._metrics.first_token(end_ns - request.arrival_ns)
        else:
            self._metrics.next_token(end_ns - sample.last_token_ns)
        sample.num_output_tokens += num_tokens
        sample.last_token_ns = end_ns

    def _finish_sample(self, live: LiveRequest, index: int, finish: Finish) -> None:
        request, sample = live.request, live.samples[index]
        sample.is_finished = True
        if live.is_expired and finish.reason is FinishReason.ABORT:
            finish = msgspec.structs.replace(finish, reason=FinishReason.ERROR, failure=_EXPIRED)
        self._metrics.sample_ended(finish, request, sample.num_output_tokens)
        live.observer.sample_finished(index, finish)
        if all(sample.is_finished for sample in live.samples):
            if live.left_ns:
                self._metrics.freed(max(finish.timing.finished_ns - live.left_ns, 0))
            self._forget(live)
        elif finish.failure is not None:
            self.abort(request.request_id)  # the call fails as a whole

    def _forget(self, live: LiveRequest) -> None:
        if live.queue_timer is not None:
            live.queue_timer.cancel()
        del self._live[live.request.request_id]
        if not self._live:
            self._idle.set()

    # ------------------------------------------------------------ deadlines

    def _patience_seconds(self, request: AddRequest) -> float:
        """How long it may wait for its first step before that is of no use."""
        patience_seconds = math.inf
        if self._queue_timeout_seconds is not None:
            patience_seconds = self._queue_timeout_seconds
        if request.deadline_ns:
            left_seconds = (request.deadline_ns - time.monotonic_ns()) * _NANO
            patience_seconds = min(patience_seconds, left_seconds)
        return patience_seconds

    def _expire(self, live: LiveRequest) -> None:
        """It has waited as long as it may, and nothing of it has run. (A caller's own deadline
        goes to the core with the request.)"""
        live.is_expired = True
        live.collector.fail(
            DeadlineExceeded(
                f"the request waited {self._queue_timeout_seconds:g} s in the queue, which is"
                " the longest that this server lets one wait"
            )
        )
        self.abort(live.request.request_id)

    # ------------------------------------------------------------ commands

    def _post(self, command: Command) -> None:
        if not self._commands:
            asyncio.get_running_loop().call_soon(self._flush)
        self._commands.append(command)

    def _flush(self) -> None:
        commands, self._commands = self._commands, []
        if commands and self._connection is not None:
            self._connection.send(commands)


def _error_of(failure: Failure) -> EngineError:
    error_type = ERRORS_BY_REASON.get(failure.reason, InternalError)
    return error_type(failure.message, field=failure.field)
