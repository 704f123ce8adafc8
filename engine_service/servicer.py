"""firsttoken.v1.Engine: validates, admits, and relays events; holds no state of its own.

A call that is cancelled, runs out of its deadline or whose client vanishes ends here by
CancelledError; `finally` closes the stream, and with that the request is aborted. There is no
other way to cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import Final, TypeVar

import grpc
import msgspec

from engine_service.caller_limits import CallerLimits
from engine_service.callers import Callers
from engine_service.constraint import read_constraint
from engine_service.constraint_checker import ConstraintChecker
from engine_service.conversions import (
    check_prompt_length,
    check_request_id,
    check_target,
    check_trace_ids,
    read_token_ids,
    to_add_request,
)
from engine_service.engine_actor import EngineActor
from engine_service.engine_info import EngineInfo
from engine_service.errors import InvalidRequest
from engine_service.grpc_status import errors_as_status
from engine_service.live_request import RequestStream
from engine_service.messages import AddRequest
from engine_service.prompt_tokenizer import PromptTokenizer
from engine_service.request_spans import GenerateSpan, generate_span
from engine_service.slow_reader import SlowReaderLimit
from engine_service.slow_traces import SlowTraces
from engine_service.stream_events import EventBuilder
from engine_service.tokenizer_files import TokenizerFiles
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc as pb_grpc
from traces.setup import Tracing

WATCH_LOAD_SECONDS: Final = 1.0  # a report that the state changed comes at once
_FAR_SECONDS: Final = 365 * 86_400.0
_CANCEL_SECONDS: Final = 5.0  # far more than gRPC takes to cancel a handler

Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext


class EngineServicer(pb_grpc.EngineServicer):
    def __init__(
        self,
        actor: EngineActor,
        info: EngineInfo,
        tokenizer_files: TokenizerFiles,
        prompt_tokenizer: PromptTokenizer,
        constraint_checker: ConstraintChecker,
        callers: Callers,
        slow_reader_timeout_seconds: float,
        tracing: Tracing,
        slow_traces: SlowTraces,
    ) -> None:
        self._actor = actor
        self._info = info
        self._tokenizer_files = tokenizer_files
        self._prompt_tokenizer = prompt_tokenizer
        self._constraint_checker = constraint_checker
        self._callers = callers
        self._caller_limits = CallerLimits(on_refused=actor.refused)
        self._slow_reader_timeout_seconds = slow_reader_timeout_seconds
        self._tracing = tracing
        self._slow_traces = slow_traces

    # ------------------------------------------------------------ generation

    async def Generate(  # type: ignore[override]  # the stubs know generators only
        self,
        request: pb.GenerateRequest,
        context: Context[pb.GenerateRequest, pb.GenerateEvent],
    ) -> None:
        arrival_ns = time.monotonic_ns()
        async with errors_as_status(context):
            metadata = context.invocation_metadata() or ()
            caller = self._callers.own(request, metadata)
            step_spans = self._actor.step_spans
            with (
                self._caller_limits.generation(caller) as allowance,
                generate_span(
                    metadata, context.time_remaining, arrival_ns, step_spans, self._slow_traces
                ) as span,
            ):
                deadline_ns = _deadline_ns(context.time_remaining(), arrival_ns)
                add_request, relaxed = await self._validate(request, arrival_ns, deadline_ns)
                if span.is_recording:
                    add_request = msgspec.structs.replace(add_request, is_traced=True)
                allowance.reserve(add_request)
                events = EventBuilder(add_request, relaxed)
                span.checked(add_request, self._info.model.name)
                stream = self._actor.submit(add_request, span, attempt=_attempt(request))
                span.admitted(add_request.n)
                try:
                    await self._relay(stream, events, context, span)
                finally:
                    stream.close()
                    allowance.used_tokens = events.num_used_tokens
                    span.answered(events.num_output_tokens)

    async def _validate(
        self, request: pb.GenerateRequest, arrival_ns: int, deadline_ns: int
    ) -> tuple[AddRequest, tuple[str, ...]]:
        """With the places of what was relaxed in its schemas."""
        self._actor.check_admits()
        model = self._info.model
        request_id = request.request_id or f"engine-{secrets.token_hex(12)}"
        check_request_id(request_id)
        check_target(request, model)
        match request.WhichOneof("prompt"):
            case "token_ids":
                prompt_token_ids = read_token_ids(request, model)
            case "text":
                prompt_token_ids = await self._prompt_tokenizer.encode(
                    request.text, model.max_model_len
                )
                check_prompt_length(len(prompt_token_ids), model)
            case _:
                raise InvalidRequest("is missing", field="prompt")
        constraint = read_constraint(request)
        checked = None
        if constraint is not None:
            checked = await self._constraint_checker.check(constraint)
        add_request = to_add_request(
            request,
            request_id,
            prompt_token_ids,
            model,
            arrival_ns,
            deadline_ns,
            structured_output=None if checked is None else checked.output,
        )
        return add_request, () if checked is None else checked.relaxed

    async def _relay(
        self,
        stream: RequestStream,
        events: EventBuilder,
        context: Context[pb.GenerateRequest, pb.GenerateEvent],
        span: GenerateSpan,
    ) -> None:
        async with SlowReaderLimit(self._slow_reader_timeout_seconds) as limit:
            await _write(context, limit, events.accepted())
            while not stream.finished:
                taken = await stream.take()
                taken_ns = time.monotonic_ns() if span.awaits_write else 0
                for sample_events in taken:
                    for event in events.events(sample_events):
                        await _write(context, limit, event)
                        if taken_ns and event.HasField("delta"):
                            span.written(event.index, taken_ns)

    async def Abort(
        self, request: pb.AbortRequest, context: Context[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse:
        async with errors_as_status(context):
            caller = self._callers.caller(context.invocation_metadata() or ())
            tenant = None if caller is None or caller.is_trusted else caller.tenant
            self._actor.abort(request.request_id, tuple(request.indices), tenant)
        return pb.AbortResponse()

    async def KeepTraces(
        self,
        request: pb.KeepTracesRequest,
        context: Context[pb.KeepTracesRequest, pb.KeepTracesResponse],
    ) -> pb.KeepTracesResponse:
        async with errors_as_status(context):
            check_trace_ids(request)
        for trace_id in request.trace_ids:
            self._tracing.keep(trace_id)
        return pb.KeepTracesResponse()

    # ------------------------------------------------------------ about the engine

    async def GetModelInfo(
        self,
        request: pb.GetModelInfoRequest,
        context: Context[pb.GetModelInfoRequest, pb.ModelInfo],
    ) -> pb.ModelInfo:
        async with errors_as_status(context):
            return self._info.model_info()

    async def GetServerInfo(
        self,
        request: pb.GetServerInfoRequest,
        context: Context[pb.GetServerInfoRequest, pb.ServerInfo],
    ) -> pb.ServerInfo:
        async with errors_as_status(context):
            return self._info.server_info()

    async def GetLoad(
        self, request: pb.GetLoadRequest, context: Context[pb.GetLoadRequest, pb.LoadReport]
    ) -> pb.LoadReport:
        return self._load()

    async def WatchLoad(  # type: ignore[override]
        self, request: pb.WatchLoadRequest, context: Context[pb.WatchLoadRequest, pb.LoadReport]
    ) -> None:
        async with (
            errors_as_status(context),
            SlowReaderLimit(self._slow_reader_timeout_seconds) as limit,
        ):
            while True:
                changed = self._actor.next_state_change
                await _write(context, limit, self._load())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WATCH_LOAD_SECONDS):
                        await changed.wait()

    async def GetTokenizer(  # type: ignore[override]
        self,
        request: pb.GetTokenizerRequest,
        context: Context[pb.GetTokenizerRequest, pb.TokenizerChunk],
    ) -> None:
        async with (
            errors_as_status(context),
            SlowReaderLimit(self._slow_reader_timeout_seconds) as limit,
        ):
            for chunk in self._tokenizer_files.chunks(request.known_digest):
                await _write(context, limit, chunk)

    def _load(self) -> pb.LoadReport:
        stats = self._actor.stats
        return pb.LoadReport(
            ready=self._actor.unavailable() is None,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            total_blocks=stats.total_blocks,
            free_blocks=stats.free_blocks,
            cached_blocks=stats.cached_blocks,
            used_blocks=stats.used_blocks,
            num_steps=stats.num_steps,
            prompt_tokens=stats.num_prompt_tokens,
            generated_tokens=stats.num_generated_tokens,
            num_preemptions=stats.num_preemptions,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            num_requests=self._actor.num_requests,
        )


async def _write(
    context: Context[Request, Response], limit: SlowReaderLimit, message: Response
) -> None:
    try:
        await limit.watch(context.write(message))
    except grpc.aio.InternalError:
        # The caller has left. gRPC is about to cancel this handler: that is the way out.
        await asyncio.sleep(_CANCEL_SECONDS)
        raise


def _attempt(request: pb.GenerateRequest) -> int | None:
    """1: the first; None: the caller doesn't say."""
    return max(request.attempt, 1) if request.HasField("attempt") else None


def _deadline_ns(remaining_seconds: float | None, now_ns: int) -> int:
    """0: the call has none, or one so far away that its nanoseconds would fit no message."""
    if remaining_seconds is None or remaining_seconds > _FAR_SECONDS:
        return 0
    return now_ns + int(remaining_seconds * 1e9)
