"""From the status of a failed rpc to a typed error.

The type is chosen by `ErrorInfo.reason` of our own domain where the status carries one; a proxy,
the gRPC library and the network know no such reason, and then the status code decides. A bare
RESOURCE_EXHAUSTED is no full queue: gRPC says so of a message or a trailer beyond its limits, which
coming again does not mend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from clients.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineClientError,
    EngineUnavailable,
    FieldViolation,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    OutOfMemory,
    PermissionDenied,
    QueueFull,
    RateLimited,
    RequestIdInUse,
    SlowReader,
    TokenizerStale,
    Unauthenticated,
)

ERROR_DOMAIN = "firsttoken"
STATUS_DETAILS_KEY = "grpc-status-details-bin"

# ErrorInfo.reason to type and status code; the codes are those of engine.proto.
ERRORS_BY_REASON: dict[str, tuple[type[EngineClientError], grpc.StatusCode]] = {
    "INVALID_VALUE": (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    "CONTEXT_LENGTH_EXCEEDED": (ContextLengthExceeded, grpc.StatusCode.OUT_OF_RANGE),
    "MODEL_NOT_FOUND": (ModelNotFound, grpc.StatusCode.NOT_FOUND),
    "QUEUE_FULL": (QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    "RATE_LIMIT_EXCEEDED": (RateLimited, grpc.StatusCode.RESOURCE_EXHAUSTED),
    "SLOW_READER": (SlowReader, grpc.StatusCode.RESOURCE_EXHAUSTED),
    "OUT_OF_MEMORY": (OutOfMemory, grpc.StatusCode.RESOURCE_EXHAUSTED),
    "REQUEST_ID_IN_USE": (RequestIdInUse, grpc.StatusCode.ALREADY_EXISTS),
    "TOKENIZER_STALE": (TokenizerStale, grpc.StatusCode.FAILED_PRECONDITION),
    "ENGINE_UNAVAILABLE": (EngineUnavailable, grpc.StatusCode.UNAVAILABLE),
    "DEADLINE_EXCEEDED": (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    "INTERNAL_ERROR": (InternalError, grpc.StatusCode.INTERNAL),
    "UNAUTHENTICATED": (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    "PERMISSION_DENIED": (PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
}

# What a bare code means. CANCELLED from afar: we did not cancel, so the engine's end went away.
_ERRORS_BY_CODE: dict[grpc.StatusCode, type[EngineClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: ContextLengthExceeded,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: InternalError,
    grpc.StatusCode.ALREADY_EXISTS: RequestIdInUse,
    grpc.StatusCode.FAILED_PRECONDITION: TokenizerStale,
    grpc.StatusCode.UNAVAILABLE: EngineUnavailable,
    grpc.StatusCode.CANCELLED: EngineUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}


def error_from_rpc(error: grpc.aio.AioRpcError, *, request_id: str = "") -> EngineClientError:
    details = _RichDetails(error)
    if details.reason in ERRORS_BY_REASON:
        error_type, _ = ERRORS_BY_REASON[details.reason]
    else:
        error_type = _ERRORS_BY_CODE.get(error.code(), InternalError)
    return error_type(
        error.details() or error.code().name,
        request_id=request_id,
        reason=details.reason,
        retry_after_seconds=details.retry_after_seconds,
        field_violations=details.field_violations,
    )


class _RichDetails:
    """What google.rpc.Status adds to a status; empty where there is none or it is broken."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.reason = ""
        self.retry_after_seconds: float | None = None
        self.field_violations: tuple[FieldViolation, ...] = ()
        try:
            for detail in _packed_details(error):
                self._take(detail)
        except DecodeError:
            pass  # the code and its message still stand

    def _take(self, detail: AnyMessage) -> None:
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(info):
            if info.domain == ERROR_DOMAIN:
                self.reason = info.reason
        elif detail.Unpack(retry):
            self.retry_after_seconds = retry.retry_delay.ToTimedelta().total_seconds()
        elif detail.Unpack(bad_request):
            self.field_violations = tuple(
                FieldViolation(violation.field, violation.description)
                for violation in bad_request.field_violations
            )


def _packed_details(error: grpc.aio.AioRpcError) -> Iterator[AnyMessage]:
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata())
    for key, value in metadata:
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            yield from status_pb2.Status.FromString(value).details
