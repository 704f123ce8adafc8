"""How an EngineError becomes a gRPC status: one table, and google.rpc details.

Every status carries ErrorInfo (reason, domain "firsttoken"), RetryInfo when the caller should
come again, and BadRequest when a field is to blame. A status is a few kilobytes at most: gRPC drops
trailers of 8 KiB and more, and with them the code, in favour of one that tells to come again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from engine_service.errors import EngineError, InternalError

logger = logging.getLogger(__name__)

ERROR_DOMAIN: Final = "firsttoken"

CODES: Final[dict[str, int]] = {
    "INVALID_VALUE": code_pb2.INVALID_ARGUMENT,
    "CONTEXT_LENGTH_EXCEEDED": code_pb2.OUT_OF_RANGE,
    "MODEL_NOT_FOUND": code_pb2.NOT_FOUND,
    "QUEUE_FULL": code_pb2.RESOURCE_EXHAUSTED,
    "RATE_LIMIT_EXCEEDED": code_pb2.RESOURCE_EXHAUSTED,
    "SLOW_READER": code_pb2.RESOURCE_EXHAUSTED,
    "OUT_OF_MEMORY": code_pb2.RESOURCE_EXHAUSTED,
    "REQUEST_ID_IN_USE": code_pb2.ALREADY_EXISTS,
    "TOKENIZER_STALE": code_pb2.FAILED_PRECONDITION,
    "ENGINE_UNAVAILABLE": code_pb2.UNAVAILABLE,
    "UNAUTHENTICATED": code_pb2.UNAUTHENTICATED,
    "PERMISSION_DENIED": code_pb2.PERMISSION_DENIED,
    "DEADLINE_EXCEEDED": code_pb2.DEADLINE_EXCEEDED,
    "INTERNAL_ERROR": code_pb2.INTERNAL,
}

# The message travels three times: percent-encoded, and twice in base64.
MAX_MESSAGE_BYTES: Final = 1024
MAX_FIELD_BYTES: Final = 256

_STATUS_SECONDS: Final = 5.0  # for a status to get past what the reader has not read yet

Request = TypeVar("Request")
Response = TypeVar("Response")


def code_name(error: EngineError) -> str:
    """INVALID_ARGUMENT, ..."""
    name: str = code_pb2.Code.Name(CODES[error.reason])
    return name


def to_status(error: EngineError) -> grpc.Status:
    message = _cut(error.message, MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=CODES[error.reason], message=message)
    details: list[any_pb2.Any] = [any_pb2.Any() for _ in range(3)]
    details[0].Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN))
    status.details.append(details[0])
    if error.retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        details[1].Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status.details.append(details[1])
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field, MAX_FIELD_BYTES), description=message
        )
        details[2].Pack(error_details_pb2.BadRequest(field_violations=[violation]))
        status.details.append(details[2])
    return rpc_status.to_status(status)


def _cut(text: str, max_bytes: int) -> str:
    """Valid UTF-8 of at most that many bytes, whatever a caller's values brought into it."""
    encoded = text.encode(errors="replace")
    if len(encoded) > max_bytes:
        encoded = encoded[: max_bytes - 3] + b"..."
    return encoded.decode(errors="ignore")


@asynccontextmanager
async def errors_as_status(
    context: grpc.aio.ServicerContext[Request, Response],
) -> AsyncIterator[None]:
    """Whatever a handler's body raises ends the call with the right status.

    A cancelled call, and one that gRPC itself has ended, pass through untouched.
    """
    try:
        yield
    except EngineError as error:
        await _abort(context, error)
    except grpc.aio.BaseError:
        raise
    except Exception:
        logger.exception("a call failed")
        await _abort(context, InternalError("the engine service failed"))


async def _abort(context: grpc.aio.ServicerContext[Request, Response], error: EngineError) -> None:
    """Raises gRPC's own AbortError; gives up waiting for a reader that does not read."""
    status = to_status(error)
    try:
        async with asyncio.timeout(_STATUS_SECONDS):
            await context.abort(status.code, status.details, status.trailing_metadata)
    except TimeoutError:
        pass  # it is sent as soon as the reader makes room
    except grpc.aio.InternalError:
        pass  # the caller has left meanwhile
