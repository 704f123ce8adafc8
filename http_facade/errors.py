"""One error envelope, and one table from what went wrong to what HTTP says.

Every answer that isn't a success is an `ApiError` rendered as
`{"error": {"message", "type", "param", "code"}}`. Engine errors arrive typed (the client chose the
type by `ErrorInfo.reason`) and are translated here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from aiohttp import web

from clients.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineClientError,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    OutOfMemory,
    PermissionDenied,
    QueueFull,
    RateLimited,
    SlowReader,
    TokenizerStale,
    Unauthenticated,
)

DEFAULT_RETRY_SECONDS = 1.0  # when the engine gave no hint of its own
MAX_MESSAGE_CHARS = 2_000


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiError(Exception):
    """An answer that isn't a success. `message` is for the caller: no traceback, path or repr."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None,
        type: str = "invalid_request_error",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _writable(message if len(message) <= MAX_MESSAGE_CHARS else _cut(message))
        self.type = type
        self.param = None if param is None else _writable(param)
        self.code = code
        self.headers = dict(headers or {})

    def envelope(self) -> ErrorEnvelope:
        return ErrorEnvelope(ErrorBody(self.message, self.type, self.param, self.code))

    def response(self) -> web.Response:
        return web.Response(
            status=self.status,
            body=msgspec.json.encode(self.envelope()),
            content_type="application/json",
            headers=self.headers,
        )


def _cut(message: str) -> str:
    return message[: MAX_MESSAGE_CHARS - 1] + "…"


def _writable(text: str) -> str:
    """What quotes a caller may hold lone surrogates, which no answer can carry."""
    return text.encode(errors="replace").decode()


# ---------------------------------------------------------------- refusals made here


def invalid(param: str | None, message: str, *, code: str = "invalid_value") -> ApiError:
    """A wrong field; the message starts with its name so that it stands alone in a log."""
    text = f"{param}: {message}" if param else message
    return ApiError(400, text, param=param, code=code)


def model_not_found(model: str) -> ApiError:
    shown = model if len(model) <= 200 else model[:200] + "…"
    return ApiError(
        404, f"the model `{shown}` does not exist", param="model", code="model_not_found"
    )


def context_length_exceeded(
    prompt_tokens: int, max_model_len: int, param: str, *, at_least: bool = False
) -> ApiError:
    """`at_least`: the prompt was too long to be counted, and this is a lower bound."""
    return ApiError(
        400,
        f"the prompt has {'at least ' if at_least else ''}{prompt_tokens} tokens, but the model's "
        f"context holds {max_model_len}, prompt and answer together",
        param=param,
        code="context_length_exceeded",
    )


def unsupported_encoding() -> ApiError:
    return ApiError(
        415,
        "a request body may have the Content-Encoding gzip, deflate or identity, and one only",
        code="unsupported_media_type",
    )


def rate_limited(message: str, retry_after_seconds: float | None) -> ApiError:
    return ApiError(
        429,
        message,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers=retry_headers(retry_after_seconds),
    )


def unavailable(message: str, retry_after_seconds: float | None = None) -> ApiError:
    return ApiError(
        503,
        message,
        type="server_error",
        code="engine_unavailable",
        headers=retry_headers(retry_after_seconds),
    )


def overloaded(message: str) -> ApiError:
    """This server has no room left, whatever the engine has."""
    return ApiError(
        503,
        message,
        type="server_error",
        code="server_overloaded",
        headers=retry_headers(None),
    )


def internal() -> ApiError:
    return ApiError(
        500, "the server failed to answer this request", type="server_error", code="internal_error"
    )


def retry_headers(seconds: float | None) -> dict[str, str]:
    hint = DEFAULT_RETRY_SECONDS if seconds is None else max(seconds, 0.0)
    return {
        "Retry-After": str(math.ceil(hint)),
        "retry-after-ms": str(math.ceil(hint * 1000)),
        "x-should-retry": "true",
    }


# ---------------------------------------------------------------- refusals of HTTP itself

_HTTP_ERRORS = {
    404: ("not_found", "there is no such path here"),
    405: ("method_not_allowed", "this path does not take that method"),
    413: ("request_too_large", "the request body is too large"),
    415: ("unsupported_media_type", "the request body must be application/json"),
    417: ("expectation_failed", "of all expectations only `Expect: 100-continue` can be met"),
}


def from_http_exception(error: web.HTTPException) -> ApiError:
    """What aiohttp's router and body reader refuse, in our envelope."""
    code, message = _HTTP_ERRORS.get(error.status, ("bad_request", error.reason))
    kept = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    return ApiError(error.status, message, code=code, headers=kept)


# ---------------------------------------------------------------- failures of the engine

# engine.proto groups what the HTTP API has flat
_GROUPS = ("sampling.", "stopping.", "response.", "kv.")


def _api_param(field: str, prompt_param: str) -> str:
    for group in _GROUPS:
        field = field.removeprefix(group)
    if field.split(".")[0].split("[")[0] in ("prompt", "token_ids", "text"):
        return prompt_param
    return field


def _said(error: EngineClientError, otherwise: str) -> str:
    """Without a reason the message is the transport's own, which names addresses."""
    return error.message if error.reason else otherwise


def from_engine_error(error: EngineClientError, *, prompt_param: str, model: str) -> ApiError:
    """`prompt_param` is what the endpoint calls its prompt: messages or prompt."""
    match error:
        case ContextLengthExceeded():
            text = _said(error, "the prompt is longer than the model's context")
            return ApiError(400, text, param=prompt_param, code="context_length_exceeded")
        case InvalidRequest():
            fields = [_api_param(v.field, prompt_param) for v in error.field_violations]
            reasons = "; ".join(v.description for v in error.field_violations)
            text = reasons or _said(error, "the engine refused the request as invalid")
            return invalid(fields[0] if fields else None, text)
        case ModelNotFound():
            return model_not_found(model)
        case RateLimited():
            return rate_limited(
                _said(error, "the server's own key is at its limit"), error.retry_after_seconds
            )
        case QueueFull():
            return ApiError(
                429,
                _said(error, "the engine's queue is full"),
                type="rate_limit_error",
                code="queue_full",
                headers=retry_headers(error.retry_after_seconds),
            )
        case OutOfMemory():
            text = _said(error, "the engine has no memory left for this request")
            return ApiError(503, text, type="server_error", code="out_of_memory")
        case SlowReader():
            text = _said(error, "the answer was read too slowly")
            return ApiError(503, text, type="server_error", code="slow_reader")
        case Unauthenticated() | PermissionDenied():
            # Ours, not the caller's: it is the facade's key (--engine-api-key) that was refused.
            return unavailable("the engine does not accept this server's own credential")
        case TokenizerStale():  # once more after it was fetched anew: models are being replaced
            return unavailable("the model was replaced meanwhile", error.retry_after_seconds)
        case EngineUnavailable():
            text = _said(error, "the engine is not available")
            return unavailable(text, error.retry_after_seconds)
        case DeadlineExceeded():
            return ApiError(
                504,
                _said(error, "the request's deadline passed"),
                type="timeout_error",
                code="deadline_exceeded",
                headers={"x-should-retry": "false"},
            )
        case _:
            return internal()
