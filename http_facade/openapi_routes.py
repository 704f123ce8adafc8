"""Each route of the facade, as /openapi.json tells of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from http_facade.answering import StreamFailure
from http_facade.chat_answers import ChatChunk, ChatCompletion
from http_facade.completion_answers import Completion
from http_facade.routes.models import ModelBody, ModelList
from http_facade.routes.probes import Health, Readiness
from http_facade.routes.texts import DetokenizeBody, RenderBody, TokenizeBody
from http_facade.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_GENERATION_ERRORS = (400, 401, 403, 404, 413, 415, 429, 500, 503, 504)
_TEXT_ERRORS = (400, 401, 403, 404, 413, 415, 500, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    method: Literal["GET", "POST"]
    path: str
    name: str  # operationId
    tag: str
    summary: str
    description: str = ""
    request: type[Struct] | None = None
    answer: type[Struct] | None = None  # as JSON; None: another kind of document
    media_types: tuple[str, ...] = ()  # then
    result: str = "The answer."
    events: tuple[type[Struct], ...] = ()  # what a stream's events may hold
    errors: tuple[int, ...] = (401, 403, 500, 503)
    has_deadline: bool = False  # takes x-request-timeout
    is_open: bool = False  # asks for no key
    is_page: bool = False  # a browser opens it

    @property
    def generates(self) -> bool:
        return bool(self.events)

    def path_parameters(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.path)

    def structs(self) -> tuple[type[Struct], ...]:
        return tuple(one for one in (self.request, self.answer, *self.events) if one is not None)


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "createChatCompletion",
        "Generation",
        "Answers a chat",
        request=ChatRequest,
        answer=ChatCompletion,
        events=(ChatChunk, StreamFailure),
        errors=_GENERATION_ERRORS,
        has_deadline=True,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "createCompletion",
        "Generation",
        "Goes on with a text",
        request=CompletionRequest,
        answer=Completion,
        events=(Completion, StreamFailure),
        errors=_GENERATION_ERRORS,
        has_deadline=True,
    ),
    Operation(
        "POST",
        "/v1/chat/completions/render",
        "renderChat",
        "Text and tokens",
        "Shows the prompt of a chat",
        "The prompt that the same request to /v1/chat/completions sends to the engine, with the"
        " same checks, but nothing is generated.",
        request=ChatRequest,
        answer=RenderBody,
        errors=_TEXT_ERRORS,
    ),
    Operation(
        "POST",
        "/tokenize",
        "tokenize",
        "Text and tokens",
        "Counts and lists tokens",
        "Of a text, or of a chat as its template writes it. Longer texts than the model takes are"
        " counted, too.",
        request=TokenizeRequest,
        answer=TokenizeBody,
        errors=_TEXT_ERRORS,
    ),
    Operation(
        "POST",
        "/detokenize",
        "detokenize",
        "Text and tokens",
        "Turns tokens into text",
        "Special tokens are shown. An id that is no token of the model is refused.",
        request=DetokenizeRequest,
        answer=DetokenizeBody,
        errors=_TEXT_ERRORS,
    ),
    Operation(
        "GET",
        "/v1/models",
        "listModels",
        "Models",
        "Lists the models",
        answer=ModelList,
    ),
    Operation(
        "GET",
        "/v1/models/{model}",
        "getModel",
        "Models",
        "Tells of one model",
        answer=ModelBody,
        errors=(401, 403, 404, 500, 503),
    ),
    Operation(
        "GET",
        "/healthz",
        "healthz",
        "Operation",
        "Does this process live?",
        "Knows nothing of the engine: a restart of this process would not help that one.",
        answer=Health,
        errors=(),
        is_open=True,
    ),
    Operation(
        "GET",
        "/readyz",
        "readyz",
        "Operation",
        "Can requests be answered?",
        answer=Readiness,
        errors=(503,),
        is_open=True,
    ),
    Operation(
        "GET",
        "/metrics",
        "metrics",
        "Operation",
        "Metrics for Prometheus",
        media_types=("text/plain",),
        result="Prometheus' text format.",
    ),
    Operation(
        "GET",
        "/openapi.json",
        "openapi",
        "Pages",
        "The OpenAPI document",
        media_types=("application/json",),
        result="An OpenAPI 3.1 document.",
        is_page=True,
    ),
    Operation(
        "GET", "/docs", "docsPage", "Pages", "The API, to read in a browser",
        media_types=("text/html",), result="A page.", is_page=True,
    ),
    Operation(
        "GET", "/", "chatPage", "Pages", "A page to chat on",
        media_types=("text/html",), result="A page.", is_page=True,
    ),
    Operation(
        "GET", "/assets/{name}", "asset", "Pages", "What the pages are made of",
        media_types=("text/css", "text/javascript", "image/svg+xml"), result="A file.",
        errors=(401, 403, 404, 500, 503), is_page=True,
    ),
)  # fmt: skip

# There with --enable-traces-page only.
TRACE_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "GET", "/traces", "tracesPage", "Traces", "Requests of the trace store, in a browser",
        media_types=("text/html",), result="A page.", is_page=True,
    ),
    Operation(
        "GET", "/traces/{trace_id}", "tracePage", "Traces", "One request's waterfall",
        media_types=("text/html",), result="A page.", errors=(401, 403, 404, 500, 503),
        is_page=True,
    ),
    Operation(
        "GET",
        "/traces/data/requests",
        "listTraces",
        "Traces",
        "Lists requests, the newest first",
        "Query: `text` (in ids, model, route, cause or status), `min_ttft_ms`, `errors` (1: only"
        " those that failed), `limit` (100; at most 500).",
        media_types=("application/json",),
        result="The requests, and whether the whole store was read.",
        errors=(400, 401, 403, 500, 503),
        is_page=True,
    ),
    Operation(
        "GET",
        "/traces/data/requests/{trace_id}",
        "getTrace",
        "Traces",
        "Tells where one request's time to first token went",
        "Query: `span`, which of several requests of the trace, by its `span_id`.",
        media_types=("application/json",),
        result="What `firsttoken ttft --json` tells, with the waterfall's rows and the spans.",
        errors=(400, 401, 403, 404, 500, 503),
        is_page=True,
    ),
)  # fmt: skip
