"""The SERVER span of a generation: child of the caller's trace, parent of all that follows."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from http_facade.errors import ApiError
from http_facade.middleware import CLIENT_GONE
from http_facade.schema import GenerationFields
from http_facade.state import RequestState
from traces import names
from traces.propagation import extract

_END_USER = "enduser.pseudo.id"


@contextmanager
def server_span(
    tracer: Tracer, request: web.Request, state: RequestState, route: str
) -> Iterator[Span]:
    """Current inside the block, which runs in the request's own task: nothing leaks to others."""
    parent = extract(request.headers.items())
    with tracer.start_as_current_span(
        f"{request.method} {route}",
        context=parent,
        kind=SpanKind.SERVER,
        attributes={
            names.HTTP_REQUEST_METHOD: request.method,
            names.HTTP_ROUTE: route,
            names.REQUEST_ID: state.request_id,
            names.GEN_AI_RESPONSE_ID: state.answer_id,
        },
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
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
