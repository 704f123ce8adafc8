"""Everything a call can raise, as one tree.

    EngineClientError            message, request_id, reason, retry_after_seconds,
    │                            field_violations, usage
    ├── InvalidRequest           a field is wrong (INVALID_ARGUMENT)
    │   └── ContextLengthExceeded  (OUT_OF_RANGE)
    ├── ModelNotFound            (NOT_FOUND)
    ├── QueueFull                try again after the hint (RESOURCE_EXHAUSTED)
    │   └── RateLimited          a limit of the caller's key (RESOURCE_EXHAUSTED)
    ├── SlowReader               this reader made no progress (RESOURCE_EXHAUSTED)
    ├── OutOfMemory              (RESOURCE_EXHAUSTED)
    ├── RequestIdInUse           (ALREADY_EXISTS)
    ├── TokenizerStale           fetch the tokenizer again (FAILED_PRECONDITION)
    ├── EngineUnavailable        dead, loading, draining or out of reach (UNAVAILABLE)
    ├── DeadlineExceeded         the call's deadline passed (DEADLINE_EXCEEDED)
    ├── Unauthenticated          (UNAUTHENTICATED)
    ├── PermissionDenied         Control needs the admin key (PERMISSION_DENIED)
    ├── CallCancelled            this side closed the stream or the client while it was read
    └── InternalError            a fault of the engine (INTERNAL and anything unknown)

A type is chosen by `ErrorInfo.reason` where the status carries one, by the status code otherwise.
With a reason the message is the engine's, written for callers; an empty `reason` means that it is
the transport's own text, which names addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

from clients.types import Usage


@dataclass(frozen=True, slots=True)
class FieldViolation:
    field: str
    description: str


class EngineClientError(Exception):
    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        reason: str = "",
        retry_after_seconds: float | None = None,
        field_violations: tuple[FieldViolation, ...] = (),
        usage: Usage | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds
        self.field_violations = field_violations
        self.usage = usage  # so far, when the stream had begun


class InvalidRequest(EngineClientError):
    pass


class ContextLengthExceeded(InvalidRequest):
    pass


class ModelNotFound(EngineClientError):
    pass


class QueueFull(EngineClientError):
    pass


class RateLimited(QueueFull):
    pass


class SlowReader(EngineClientError):
    pass


class OutOfMemory(EngineClientError):
    pass


class RequestIdInUse(EngineClientError):
    pass


class TokenizerStale(EngineClientError):
    pass


class EngineUnavailable(EngineClientError):
    pass


class DeadlineExceeded(EngineClientError):
    pass


class Unauthenticated(EngineClientError):
    pass


class PermissionDenied(EngineClientError):
    pass


class CallCancelled(EngineClientError):
    pass


class InternalError(EngineClientError):
    pass
