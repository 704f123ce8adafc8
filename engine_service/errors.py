"""Everything the engine refuses or fails with, as one tree.

    EngineError
    ├── InvalidRequest          a field is wrong; names it
    ├── ContextLengthExceeded   the prompt leaves no room for one token
    ├── ModelNotFound           not the model served here
    ├── QueueFull               try again after `retry_after_seconds`
    │   └── WaitTooLong         there is room, but not in the time that the request has
    ├── RateLimited             the caller's key has used what it may; `retry_after_seconds`
    ├── SlowReader              the stream's reader made no progress
    ├── OutOfMemory             the device has no memory for this request
    ├── RequestIdInUse          a live request has this id
    ├── TokenizerStale          token ids were made by another tokenizer
    ├── EngineUnavailable       the core is dead, loading or draining
    ├── Unauthenticated         no key, or an unknown one, where one is asked for
    ├── PermissionDenied        the key does not open this: Control, or another's tenant
    ├── DeadlineExceeded        the caller's deadline passed
    └── InternalError           a fault of ours

`reason` is the name of `ErrorReason` in engine.proto; `grpc_status.py` maps it to a status.
Messages are written for the caller: no traceback, path or repr.
"""

from __future__ import annotations

from typing import ClassVar


class EngineError(Exception):
    reason: ClassVar[str] = "INTERNAL_ERROR"

    def __init__(
        self, message: str, *, field: str = "", retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_seconds = retry_after_seconds


class InvalidRequest(EngineError):
    reason = "INVALID_VALUE"


class ContextLengthExceeded(EngineError):
    reason = "CONTEXT_LENGTH_EXCEEDED"


class ModelNotFound(EngineError):
    reason = "MODEL_NOT_FOUND"


class QueueFull(EngineError):
    reason = "QUEUE_FULL"


class WaitTooLong(QueueFull):
    pass


class RateLimited(EngineError):
    reason = "RATE_LIMIT_EXCEEDED"


class SlowReader(EngineError):
    reason = "SLOW_READER"


class OutOfMemory(EngineError):
    reason = "OUT_OF_MEMORY"


class RequestIdInUse(EngineError):
    reason = "REQUEST_ID_IN_USE"


class TokenizerStale(EngineError):
    reason = "TOKENIZER_STALE"


class EngineUnavailable(EngineError):
    reason = "ENGINE_UNAVAILABLE"


class Unauthenticated(EngineError):
    reason = "UNAUTHENTICATED"


class PermissionDenied(EngineError):
    reason = "PERMISSION_DENIED"


class DeadlineExceeded(EngineError):
    reason = "DEADLINE_EXCEEDED"


class InternalError(EngineError):
    reason = "INTERNAL_ERROR"


ERRORS_BY_REASON: dict[str, type[EngineError]] = {
    cls.reason: cls for cls in EngineError.__subclasses__()
}
