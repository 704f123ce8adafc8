"""The asynchronous client of one engine; `sync_client` is its synchronous twin."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeVar

from clients import health
from clients.connection import Connection
from clients.conversions import (
    load_report_from_proto,
    model_info_from_proto,
    server_info_from_proto,
)
from clients.errors import CallCancelled, EngineUnavailable
from clients.generate_stream import GenerateStream
from clients.options import ClientOptions
from clients.retry import Deadline, RetryPolicy, retrying
from clients.rpc_span import CONTROL, RpcSpan
from clients.tokenizer_fetch import read_tokenizer
from clients.types import GenerateRequest, LoadReport, ModelInfo, ServerInfo, TokenizerBundle
from protos import engine_pb2

_API_MAJOR_VERSION = "1"
_TOKENIZER_TIMEOUT_SECONDS = 60.0  # several MB, perhaps from an engine that is busy

T = TypeVar("T")

logger = logging.getLogger(__name__)


class EngineClient:
    """Opens no socket before its first call, and finds a restarted engine again by itself.

    `target` is what gRPC takes: `host:port`, `unix:path`, `dns:///name:port`. Calls raise the
    types of `clients.errors`. A `timeout` is in seconds, covers all attempts and is sent as the
    gRPC deadline. One client serves any number of concurrent calls on one event loop.
    """

    def __init__(self, target: str, *, options: ClientOptions = ClientOptions()) -> None:  # noqa: B008
        self._connection = Connection(target, options)
        self._options = options

    # ------------------------------------------------------------ generation

    def generate(self, request: GenerateRequest, *, timeout: float | None = None) -> GenerateStream:
        """Sent when the first event is awaited; leave the stream by `async with` or `aclose`.

        Raises InvalidRequest at once for what cannot be put on the wire.
        """
        request_id = request.request_id or f"client-{uuid.uuid4().hex}"
        return GenerateStream(self._connection, request, request_id=request_id, timeout=timeout)

    async def abort(self, request_id: str, indices: Sequence[int] = ()) -> None:
        """Ends samples (none given: all) with Finished{ABORT}; unknown ids are no error."""
        request = engine_pb2.AbortRequest(request_id=request_id, indices=indices)
        await self._retried(
            lambda timeout: self._connection.call(
                self._connection.stubs.engine.Abort,
                request,
                span=RpcSpan.inside_trace("Abort"),
                timeout=timeout,
            )
        )

    async def keep_traces(self, trace_ids: Sequence[str]) -> None:
        """Has the engine export what it holds of traces that were not sampled: 32 hexadecimal
        digits each, at most 256."""
        await self._retried(
            lambda timeout: self._connection.call(
                self._connection.stubs.engine.KeepTraces,
                engine_pb2.KeepTracesRequest(trace_ids=trace_ids),
                timeout=timeout,
            )
        )

    # ------------------------------------------------------------ about the engine

    async def get_model_info(self) -> ModelInfo:
        return model_info_from_proto(
            await self._retried(
                lambda timeout: self._connection.call(
                    self._connection.stubs.engine.GetModelInfo,
                    engine_pb2.GetModelInfoRequest(),
                    span=RpcSpan.inside_trace("GetModelInfo"),
                    timeout=timeout,
                )
            )
        )

    async def get_server_info(self) -> ServerInfo:
        """Warns in the log about an engine whose API is of another major version."""
        info = server_info_from_proto(
            await self._retried(
                lambda timeout: self._connection.call(
                    self._connection.stubs.engine.GetServerInfo,
                    engine_pb2.GetServerInfoRequest(),
                    span=RpcSpan.inside_trace("GetServerInfo"),
                    timeout=timeout,
                )
            )
        )
        if info.api_version.split(".")[0] != _API_MAJOR_VERSION:
            logger.warning(
                "the engine speaks version %s of the API and this client version %s",
                info.api_version,
                _API_MAJOR_VERSION,
            )
        return info

    async def get_load(self) -> LoadReport:
        return load_report_from_proto(
            await self._retried(
                lambda timeout: self._connection.call(
                    self._connection.stubs.engine.GetLoad,
                    engine_pb2.GetLoadRequest(),
                    span=RpcSpan.inside_trace("GetLoad"),
                    timeout=timeout,
                )
            )
        )

    async def get_tokenizer(self, known_digest: str = "") -> TokenizerBundle | None:
        """The model's text files; None where `known_digest` is still the current one."""

        async def fetch(timeout: float | None) -> TokenizerBundle | None:
            call = self._connection.open_stream(
                self._connection.stubs.engine.GetTokenizer,
                engine_pb2.GetTokenizerRequest(known_digest=known_digest),
                span=RpcSpan.inside_trace("GetTokenizer"),
                timeout=timeout,
            )
            try:
                return await read_tokenizer(call, known_digest=known_digest)
            finally:
                call.cancel()

        return await self._retried(fetch, timeout=_TOKENIZER_TIMEOUT_SECONDS)

    # ------------------------------------------------------------ following the engine

    async def wait_ready(self, timeout: float) -> None:
        """Returns once the engine serves; EngineUnavailable if it does not within `timeout`."""
        try:
            async with asyncio.timeout(timeout), aclosing(self.watch_health()) as states:
                async for is_serving in states:
                    if is_serving:
                        return
        except TimeoutError:
            raise EngineUnavailable(
                f"the engine was not ready within {timeout:g} seconds"
            ) from None
        raise CallCancelled("the client was closed")

    def watch_load(self) -> AsyncGenerator[LoadReport, None]:
        """A report at once, one a second and one at each change of `ready`; EngineUnavailable once
        they stop coming.

        Leave it by `contextlib.aclosing`, as `watch_health`.
        """
        return health.watch_load(self._connection)

    def watch_health(self) -> AsyncGenerator[bool, None]:
        """Whether the engine serves: at once, and at each change, until the client is closed.

        Reconnects by itself; an engine out of reach, or silent for `silence_seconds`, is False.
        """
        return health.watch_health(self._connection)

    # ------------------------------------------------------------ control, with the admin key

    async def flush_prefix_cache(self) -> int:
        """Forgets every cached prefix; returns how many blocks held one.

        PermissionDenied without the admin key of `ClientOptions`.
        """
        response = await self._retried(
            lambda timeout: self._connection.call(
                self._connection.stubs.control.FlushPrefixCache,
                engine_pb2.FlushPrefixCacheRequest(),
                span=RpcSpan.inside_trace("FlushPrefixCache", service=CONTROL),
                timeout=timeout,
                as_admin=True,
            )
        )
        return response.num_blocks

    async def drain(self) -> int:
        """The engine takes nothing new and ends when what runs is done, or the grace is over;
        returns the number of live requests. PermissionDenied as `flush_prefix_cache`."""
        response = await self._retried(
            lambda timeout: self._connection.call(
                self._connection.stubs.control.Drain,
                engine_pb2.DrainRequest(),
                span=RpcSpan.inside_trace("Drain", service=CONTROL),
                timeout=timeout,
                as_admin=True,
            )
        )
        return response.num_requests

    # ------------------------------------------------------------ life

    async def close(self) -> None:
        """Cancels what is open and closes the connection. Idempotent."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _retried(
        self, call: Callable[[float | None], Awaitable[T]], *, timeout: float | None = None
    ) -> T:
        """For calls that may be repeated; each attempt has what is left of the time."""
        deadline = Deadline(self._options.call_timeout_seconds if timeout is None else timeout)

        async def attempt(number: int) -> T:
            return await call(deadline.remaining_seconds())

        return await retrying(
            attempt, policy=RetryPolicy.from_options(self._options), deadline=deadline
        )
