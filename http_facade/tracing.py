"""The SERVER span of a generation: child of the caller's trace, parent of all that follows."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from aiohttp import web
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from http_facade.errors import ApiError
from http_facade.facade import Facade
from http_facade.middleware import CLIENT_GONE
from http_facade.schema import GenerationFields, Message
from http_facade.state import RequestState
from traces import names
from traces.clock import now_unix_ns, unix_ns
from traces.propagation import extract

_END_USER = "enduser.pseudo.id"


@contextmanager
def server_span(
    facade: Facade, request: web.Request, state: RequestState, route: str
) -> Iterator[Span]:
    """Current inside the block, which runs in the request's own task: nothing leaks to others."""
    span = facade.tracer.start_span(
        f"{request.method} {route}",
        context=extract(request.headers.items()),
        kind=SpanKind.SERVER,
        start_time=arrival_unix_ns(state),
        attributes={
            names.HTTP_REQUEST_METHOD: request.method,
            names.HTTP_ROUTE: route,
            names.REQUEST_ID: state.request_id,
            names.GEN_AI_RESPONSE_ID: state.answer_id,
        },
    )
    with trace.use_span(span, record_exception=False, set_status_on_exception=False):
        status = 200
        try:
            yield span
        except ApiError as error:
            status, state.error_code = error.status, error.code or str(error.status)
            raise
        except (asyncio.CancelledError, ConnectionError):
            status, state.error_code = CLIENT_GONE, "client_gone"
            raise
        except Exception:
            status, state.error_code = 500, "internal_error"
            raise
        finally:
            _describe_end(span, status, state)
            span.end(now_unix_ns())
            if state.first_content_seconds is None:
                facade.slow_traces.judge(span, state.elapsed_seconds())


def arrival_unix_ns(state: RequestState) -> int:
    return unix_ns(int(state.started * 1e9))


def prompts_are_made(span: Span, state: RequestState) -> None:
    state.prepared_seconds = state.elapsed_seconds()
    if span.is_recording():
        span.add_event(names.EVENT_PREPARED, timestamp=now_unix_ns())


class FirstContent:
    """The way of an answer's first content from the engine's events into the socket.

    What comes after it costs one check.
    """

    def __init__(self, facade: Facade, span: Span, state: RequestState) -> None:
        self._facade = facade
        self._span = span
        self._state = state
        self._there_unix_ns = 0

    def is_there(self) -> None:
        """It was taken from the run, to be written next."""
        if self._is_awaited:
            self._there_unix_ns = now_unix_ns()

    def written(self) -> None:
        if not self._is_awaited:
            return
        written_unix_ns = now_unix_ns()
        self._came(written_unix_ns)
        if not self._span.is_recording():
            return
        context = trace.set_span_in_context(self._span)
        write = self._facade.tracer.start_span(
            names.SPAN_FIRST_WRITE, context=context, start_time=self._there_unix_ns
        )
        write.end(written_unix_ns)
        self._span.add_event(names.EVENT_FIRST_BYTE_WRITTEN, timestamp=written_unix_ns)

    def kept_for_later(self) -> None:
        """The answer is written as a whole, when all is there."""
        if self._is_awaited:
            self._came(self._there_unix_ns)
            if self._span.is_recording():
                self._span.add_event(names.EVENT_FIRST_TEXT, timestamp=self._there_unix_ns)

    @property
    def _is_awaited(self) -> bool:
        return self._state.first_content_seconds is None

    def _came(self, first_unix_ns: int) -> None:
        seconds = (first_unix_ns - arrival_unix_ns(self._state)) * 1e-9
        self._state.first_content_seconds = seconds
        self._facade.slow_traces.judge(self._span, seconds)


def _describe_end(span: Span, status: int, state: RequestState) -> None:
    span.set_attribute(names.HTTP_RESPONSE_STATUS_CODE, status)
    span.set_attribute(names.GEN_AI_USAGE_INPUT_TOKENS, state.prompt_tokens)
    span.set_attribute(names.GEN_AI_USAGE_OUTPUT_TOKENS, state.completion_tokens)
    if state.finish_reasons:
        span.set_attribute(names.GEN_AI_RESPONSE_FINISH_REASONS, state.finish_reasons)
    if state.error_code:
        span.set_attribute(names.ERROR_TYPE, state.error_code)
        if status >= CLIENT_GONE or status == 200:  # not the caller's mistakes
            span.set_status(Status(StatusCode.ERROR, state.error_code))


def describe_first_message(span: Span, message: Message) -> None:
    """So that it can be told when a template put something else around the same message."""
    if not span.is_recording():
        return
    encoded = msgspec.json.encode(message)
    span.set_attribute(names.FIRST_MESSAGE, hashlib.sha256(encoded).hexdigest()[:16])
    span.set_attribute(names.FIRST_MESSAGE_CHARS, len(encoded))


def describe_request(span: Span, fields: GenerationFields, operation: str) -> None:
    asked: dict[str, str | int | float | None] = {
        names.GEN_AI_OPERATION_NAME: operation,
        names.GEN_AI_REQUEST_MODEL: fields.model,
        names.GEN_AI_REQUEST_MAX_TOKENS: fields.max_completion_tokens or fields.max_tokens,
        names.GEN_AI_REQUEST_TEMPERATURE: fields.temperature,
        names.GEN_AI_REQUEST_TOP_P: fields.top_p,
        names.GEN_AI_REQUEST_TOP_K: fields.top_k,
        names.GEN_AI_REQUEST_SEED: fields.seed,
        names.GEN_AI_REQUEST_CHOICE_COUNT: fields.n,
        names.STREAM: fields.stream,
    }
    span.set_attributes({name: value for name, value in asked.items() if value is not None})
    if end_user := fields.safety_identifier or fields.user:
        # recognisable, not readable
        span.set_attribute(_END_USER, hashlib.sha256(end_user.encode()).hexdigest()[:16])
