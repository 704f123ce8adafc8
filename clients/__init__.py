"""Python client of the engine's gRPC API.

    async with EngineClient("127.0.0.1:50051") as client:
        async with client.generate(GenerateRequest(prompt="Hello")) as stream:
            async for event in stream:
                print(event)

`SyncEngineClient` is the same without asyncio; `clients.testing` has a scripted engine for tests.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from clients.engine_client import EngineClient
    from clients.errors import (
        CallCancelled,
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
    from clients.generate_stream import GenerateStream
    from clients.options import ClientOptions, TlsOptions
    from clients.sync_client import SyncEngineClient, SyncGenerateStream
    from clients.types import (
        Accepted,
        Delta,
        Finished,
        FinishReason,
        GenerateEvent,
        GenerateRequest,
        GenerationDefaults,
        LoadReport,
        ModelInfo,
        PrefillProgress,
        SamplingParams,
        ServerInfo,
        StoppingCriteria,
        StructuredOutput,
        Timing,
        TokenizerBundle,
        TokenLogprobs,
        Usage,
        Wait,
    )

__all__ = [
    "Accepted",
    "CallCancelled",
    "ClientOptions",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "Delta",
    "EngineClient",
    "EngineClientError",
    "EngineUnavailable",
    "FieldViolation",
    "FinishReason",
    "Finished",
    "GenerateEvent",
    "GenerateRequest",
    "GenerateStream",
    "GenerationDefaults",
    "InternalError",
    "InvalidRequest",
    "LoadReport",
    "ModelInfo",
    "ModelNotFound",
    "OutOfMemory",
    "PermissionDenied",
    "PrefillProgress",
    "QueueFull",
    "RateLimited",
    "RequestIdInUse",
    "SamplingParams",
    "ServerInfo",
    "SlowReader",
    "StoppingCriteria",
    "StructuredOutput",
    "SyncEngineClient",
    "SyncGenerateStream",
    "Timing",
    "TlsOptions",
    "TokenLogprobs",
    "TokenizerBundle",
    "TokenizerStale",
    "Unauthenticated",
    "Usage",
    "Wait",
]

_HOMES: Final = (
    "clients.engine_client",
    "clients.errors",
    "clients.generate_stream",
    "clients.options",
    "clients.sync_client",
    "clients.types",
)


def __getattr__(name: str) -> object:
    """Loads the client when its first name is used: `firsttoken` lives in this package too, and
    needs no gRPC to start others that do."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for home in _HOMES:
        members = vars(import_module(home))
        globals().update({member: members[member] for member in __all__ if member in members})
    return globals()[name]
