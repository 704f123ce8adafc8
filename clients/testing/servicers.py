"""The gRPC side of a FakeEngine: the real protocol, played from scripts."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, NoReturn, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from clients.errors import EngineClientError, PermissionDenied, Unauthenticated
from clients.testing import encoding
from clients.testing.fake_call import FakeCall, Outcome, ScriptedFailure
from protos import engine_pb2, engine_pb2_grpc

if TYPE_CHECKING:
    from clients.testing.fake_engine import FakeEngine

_CHUNK_BYTES = 1024 * 1024
_LOAD_SECONDS = 1.0

Request = TypeVar("Request")
Response = TypeVar("Response")


class FakeEngineServicer(engine_pb2_grpc.EngineServicer):
    def __init__(self, fake: FakeEngine) -> None:
        self._fake = fake

    async def Generate(
        self,
        request: engine_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[engine_pb2.GenerateRequest, engine_pb2.GenerateEvent],
    ) -> AsyncIterator[engine_pb2.GenerateEvent]:
        await self._enter(context)
        call = FakeCall(
            encoding.request_from_proto(request),
            metadata=_text_metadata(context),
            timeout_seconds=context.time_remaining(),
            model_info=self._fake.model_info,
        )
        try:
            script = await self._fake.admit(call)
        except EngineClientError as error:
            await _abort(context, error)
        outcome = Outcome.CANCELLED
        try:
            async with aclosing(call.play(script)) as events:
                async for event in events:
                    yield event
                    await self._fake.thawed.wait()
            outcome = Outcome.FINISHED
        except ScriptedFailure as failure:
            outcome = Outcome.FAILED
            await _abort(context, failure.step.error, with_details=failure.step.with_details)
        finally:
            call.close(outcome)

    async def Abort(
        self,
        request: engine_pb2.AbortRequest,
        context: grpc.aio.ServicerContext[engine_pb2.AbortRequest, engine_pb2.AbortResponse],
    ) -> engine_pb2.AbortResponse:
        await self._enter(context)
        self._fake.abort(request.request_id, tuple(request.indices))
        return engine_pb2.AbortResponse()

    async def KeepTraces(
        self,
        request: engine_pb2.KeepTracesRequest,
        context: grpc.aio.ServicerContext[
            engine_pb2.KeepTracesRequest, engine_pb2.KeepTracesResponse
        ],
    ) -> engine_pb2.KeepTracesResponse:
        await self._enter(context)
        self._fake.kept_traces += request.trace_ids
        return engine_pb2.KeepTracesResponse()

    async def GetModelInfo(
        self,
        request: engine_pb2.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[engine_pb2.GetModelInfoRequest, engine_pb2.ModelInfo],
    ) -> engine_pb2.ModelInfo:
        await self._enter(context)
        return encoding.model_info_to_proto(self._fake.model_info)

    async def GetServerInfo(
        self,
        request: engine_pb2.GetServerInfoRequest,
        context: grpc.aio.ServicerContext[engine_pb2.GetServerInfoRequest, engine_pb2.ServerInfo],
    ) -> engine_pb2.ServerInfo:
        await self._enter(context)
        return encoding.server_info_to_proto(self._fake.server_info)

    async def GetLoad(
        self,
        request: engine_pb2.GetLoadRequest,
        context: grpc.aio.ServicerContext[engine_pb2.GetLoadRequest, engine_pb2.LoadReport],
    ) -> engine_pb2.LoadReport:
        await self._enter(context)
        return encoding.load_report_to_proto(self._fake.load)

    async def WatchLoad(
        self,
        request: engine_pb2.WatchLoadRequest,
        context: grpc.aio.ServicerContext[engine_pb2.WatchLoadRequest, engine_pb2.LoadReport],
    ) -> AsyncIterator[engine_pb2.LoadReport]:
        await self._enter(context)
        while True:
            yield encoding.load_report_to_proto(self._fake.load)
            await asyncio.sleep(_LOAD_SECONDS)
            await self._fake.thawed.wait()

    async def GetTokenizer(
        self,
        request: engine_pb2.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[
            engine_pb2.GetTokenizerRequest, engine_pb2.TokenizerChunk
        ],
    ) -> AsyncIterator[engine_pb2.TokenizerChunk]:
        await self._enter(context)
        bundle = self._fake.tokenizer
        if request.known_digest == bundle.digest:
            yield engine_pb2.TokenizerChunk(digest=bundle.digest)
            return
        listing = [
            engine_pb2.TokenizerFile(name=name, size_bytes=len(content))
            for name, content in bundle.files.items()
        ]
        yield engine_pb2.TokenizerChunk(digest=bundle.digest, files=listing)
        for content in bundle.files.values():
            for start in range(0, len(content), _CHUNK_BYTES):
                yield engine_pb2.TokenizerChunk(data=content[start : start + _CHUNK_BYTES])

    async def _enter(self, context: grpc.aio.ServicerContext[Request, Response]) -> None:
        """What each call passes: a frozen engine answers none, and a token is demanded of all."""
        await self._fake.thawed.wait()
        if self._fake.token is not None and not _is_bearer(context, self._fake.token):
            await _abort(context, Unauthenticated("no or wrong token"))


class FakeControlServicer(engine_pb2_grpc.ControlServicer):
    def __init__(self, fake: FakeEngine) -> None:
        self._fake = fake

    async def FlushPrefixCache(
        self,
        request: engine_pb2.FlushPrefixCacheRequest,
        context: grpc.aio.ServicerContext[
            engine_pb2.FlushPrefixCacheRequest, engine_pb2.FlushPrefixCacheResponse
        ],
    ) -> engine_pb2.FlushPrefixCacheResponse:
        await self._enter(context)
        return engine_pb2.FlushPrefixCacheResponse(num_blocks=self._fake.flush_prefix_cache())

    async def Drain(
        self,
        request: engine_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[engine_pb2.DrainRequest, engine_pb2.DrainResponse],
    ) -> engine_pb2.DrainResponse:
        await self._enter(context)
        await self._fake.set_serving(False)
        return engine_pb2.DrainResponse(num_requests=self._fake.num_open_calls)

    async def _enter(self, context: grpc.aio.ServicerContext[Request, Response]) -> None:
        await self._fake.thawed.wait()
        key = self._fake.admin_key
        if key is None or not _is_bearer(context, key):
            await _abort(context, PermissionDenied("no or wrong admin key"))


class FakeHealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    def __init__(self, fake: FakeEngine) -> None:
        self._fake = fake

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[
            health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        ],
    ) -> health_pb2.HealthCheckResponse:
        await self._fake.thawed.wait()
        return _health(self._fake.is_serving)

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[
            health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        ],
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        while True:
            await self._fake.thawed.wait()
            is_serving = self._fake.is_serving
            yield _health(is_serving)
            async with self._fake.state_changed:
                while self._fake.is_serving is is_serving:
                    await self._fake.state_changed.wait()


def _health(is_serving: bool) -> health_pb2.HealthCheckResponse:
    return health_pb2.HealthCheckResponse(
        status=health_pb2.HealthCheckResponse.SERVING
        if is_serving
        else health_pb2.HealthCheckResponse.NOT_SERVING
    )


def _is_bearer(context: grpc.aio.ServicerContext[Request, Response], token: str) -> bool:
    given = _text_metadata(context).get("authorization", "")
    return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())


def _text_metadata(context: grpc.aio.ServicerContext[Request, Response]) -> dict[str, str]:
    return {
        str(key): value
        for key, value in context.invocation_metadata() or ()
        if isinstance(value, str)
    }


async def _abort(
    context: grpc.aio.ServicerContext[Request, Response],
    error: EngineClientError,
    *,
    with_details: bool = True,
) -> NoReturn:
    await context.abort(
        encoding.status_code(error),
        error.message,
        trailing_metadata=(encoding.status_details(error),) if with_details else (),
    )
    raise RuntimeError("unreachable: abort raises")
