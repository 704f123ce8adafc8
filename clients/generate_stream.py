"""The events of one generation, as an async iterator whose exit cancels.

    async with client.generate(request) as stream:
        async for event in stream:
            ...

One GenerateStream may take several attempts, each an rpc of its own, until one is accepted:

    attempt 1 ──refused── wait ── attempt 2 ──Accepted── events ... Finished ── end
    └───────────── retried ──────────────┘          └──── never retried ────┘

A later attempt has a request id of its own (`<id>-r2`): the engine may still be cleaning up
after the earlier one, and a live id is refused. `x-request-id` is the same for all of them.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from opentelemetry import context as otel_context

from clients.connection import Connection, StreamCall
from clients.conversions import event_from_proto, request_to_proto
from clients.errors import (
    CallCancelled,
    DeadlineExceeded,
    EngineClientError,
    InternalError,
    InvalidRequest,
)
from clients.retry import Deadline, RetryPolicy, retrying
from clients.rpc_span import RpcSpan
from clients.types import (
    Accepted,
    Delta,
    Finished,
    GenerateEvent,
    GenerateRequest,
    PrefillProgress,
    Usage,
)
from protos import engine_pb2


class GenerateStream:
    """Nothing is sent before the first event is awaited. Read by one task at a time."""

    def __init__(
        self,
        connection: Connection,
        request: GenerateRequest,
        *,
        request_id: str,
        timeout: float | None,
    ) -> None:
        self._connection = connection
        self._message = request_to_proto(request, request_id)
        self._first_request_id = request_id
        self._num_samples = 1 if request.sampling.n is None else request.sampling.n
        self._deadline = Deadline(timeout)
        self._parent = otel_context.get_current()
        self._call: StreamCall[engine_pb2.GenerateEvent] | None = None  # None: not yet accepted
        self._span: RpcSpan | None = None  # of the last attempt
        self._unread: GenerateEvent | None = None  # seen by wait_accepted, not yet by the reader
        self._accepted: Accepted | None = None
        self._cached_tokens = 0
        self._completion_tokens = 0
        self._num_finished = 0
        self._is_over = False
        self._is_being_read = False

    @property
    def request_id(self) -> str:
        """The id that the engine knows: what `abort` takes."""
        return self._message.request_id

    @property
    def accepted(self) -> Accepted | None:
        return self._accepted

    @property
    def usage(self) -> Usage | None:
        """Counted from the events so far; None before Accepted. Final numbers are in Finished."""
        if self._accepted is None:
            return None
        return Usage(self._accepted.prompt_tokens, self._cached_tokens, self._completion_tokens)

    async def wait_accepted(self) -> Accepted:
        """Sends the request and returns once it is admitted, or raises why it is not.

        The event still comes first in the iteration. Optional: iterating does the same.
        """
        if self._accepted is None:
            self._unread = await self._read_event()
        if self._accepted is None:
            raise CallCancelled("the stream was closed", request_id=self.request_id)
        return self._accepted

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerateEvent:
        event, self._unread = self._unread, None
        if event is None:
            event = await self._read_event()
        if event is None:
            raise StopAsyncIteration
        return event

    async def aclose(self, *, is_error: bool = False) -> None:
        """Ends the generation at the engine, too, unless it is finished. Idempotent.

        `is_error` is for the trace alone: whether the stream was left because of a failure.
        """
        self._is_over = True
        self._unread = None
        if self._call is None:
            return
        if self._num_finished >= self._num_samples:
            self._call.complete()
        else:
            self._call.cancel(is_error=is_error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose(is_error=exc is not None)

    # ------------------------------------------------------------ inside

    async def _read_event(self) -> GenerateEvent | None:
        """None at the end. Whatever goes wrong here ends the call as well."""
        if self._is_being_read:
            raise RuntimeError("another task is reading this stream")
        if self._is_over:
            return None
        self._is_being_read = True
        try:
            if self._call is None:
                event = await self._open()
            else:
                event = await self._next(self._call)
        except BaseException as error:
            await self.aclose(is_error=True)
            if isinstance(error, EngineClientError):
                error.request_id = self.request_id
                error.usage = self.usage
            raise
        finally:
            self._is_being_read = False
        self._is_over = event is None
        return event

    async def _open(self) -> GenerateEvent | None:
        return await retrying(
            self._attempt,
            policy=RetryPolicy.from_options(self._connection.options),
            deadline=self._deadline,
        )

    async def _attempt(self, number: int) -> GenerateEvent | None:
        """Opens an rpc and awaits its first event; on failure it leaves no call behind."""
        if self._is_over:
            raise CallCancelled("the stream was closed")
        remaining_seconds = self._deadline.remaining_seconds()
        if remaining_seconds == 0:
            raise DeadlineExceeded("the deadline passed before the engine accepted the request")
        if number > 1:
            self._message.request_id = f"{self._first_request_id}-r{number}"
            self._message.attempt = max(self._message.attempt, 1) + 1
        self._check_size()
        stubs = self._connection.stubs
        self._span = RpcSpan("Generate", self._parent, request_id=self.request_id)
        self._call = self._connection.open_stream(
            stubs.engine.Generate,
            self._message,
            span=self._span,
            request_id=self._first_request_id,
            timeout=remaining_seconds,
        )
        try:
            return await self._next(self._call)
        except EngineClientError:
            self._call.cancel(is_error=True)
            self._call = None
            raise

    async def _next(self, call: StreamCall[engine_pb2.GenerateEvent]) -> GenerateEvent | None:
        while (message := await call.read()) is not None:
            if (event := event_from_proto(message)) is not None:
                self._observe(event)
                return event
        if self._num_finished < self._num_samples:
            raise InternalError("the engine ended the stream before the generation was finished")
        return None

    def _observe(self, event: GenerateEvent) -> None:
        match event:
            case Accepted():
                self._accepted = event
            case PrefillProgress():
                self._cached_tokens = max(self._cached_tokens, event.cached_tokens)
            case Delta():
                if self._completion_tokens == 0 and self._span is not None:
                    self._span.first_token_received()
                self._completion_tokens += len(event.token_ids)
            case Finished():
                self._num_finished += 1

    def _check_size(self) -> None:
        limit = self._connection.options.max_message_bytes
        if (size := self._message.ByteSize()) > limit:
            raise InvalidRequest(f"the request takes {size} bytes; a message may take {limit}")
