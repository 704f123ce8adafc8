"""One gRPC channel to one engine, and what every call on it carries.

Failures leave here as the types of `clients.errors`. Cancellation is always explicit: a call that
is merely forgotten runs on at the engine, because recent grpcio does not cancel it when it is
collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from clients.errors import CallCancelled
from clients.options import ClientOptions, TlsOptions
from clients.rpc_span import RpcSpan, server_attributes
from clients.status import error_from_rpc
from protos import engine_pb2_grpc

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Stubs:
    channel: grpc.aio.Channel
    tls: TlsOptions | None
    engine: engine_pb2_grpc.EngineAsyncStub
    control: engine_pb2_grpc.ControlAsyncStub
    health_check: grpc.aio.UnaryUnaryMultiCallable[
        health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
    ]
    health_watch: grpc.aio.UnaryStreamMultiCallable[
        health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
    ]


class Connection:
    """Opens no socket before the first call; reconnects by itself until it is closed.

    With new certificates new calls get a new channel. The old one is dropped, which ends none of
    its calls: it closes with the last of them.
    """

    def __init__(self, target: str, options: ClientOptions) -> None:
        self.options = options
        self._target = target
        self._server = server_attributes(target)
        self._stubs: Stubs | None = None
        # Those that are open may be of a dropped channel.
        self._streams: weakref.WeakSet[StreamCall[Any]] = weakref.WeakSet()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def stubs(self) -> Stubs:
        """Must be called on the event loop that the calls will run on."""
        if self._closed:
            raise CallCancelled("the client is closed")
        tls = self.options.tls() if callable(self.options.tls) else self.options.tls
        if self._stubs is not None and self._stubs.tls != tls:
            self._stubs = None
        if self._stubs is None:
            channel = _new_channel(self._target, self.options, tls)
            health = health_pb2_grpc.HealthStub(channel)
            self._stubs = Stubs(
                channel=channel,
                tls=tls,
                engine=engine_pb2_grpc.EngineStub(channel),
                control=engine_pb2_grpc.ControlStub(channel),
                health_check=health.Check,
                health_watch=health.Watch,
            )
        return self._stubs

    async def close(self) -> None:
        """Cancels the open calls: who reads them gets CallCancelled."""
        self._closed = True
        for stream in [*self._streams]:
            stream.cancel(is_error=True)
        stubs, self._stubs = self._stubs, None
        if stubs is not None:
            await stubs.channel.close(None)

    async def call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        *,
        span: RpcSpan | None = None,
        request_id: str = "",
        timeout: float | None = None,
        as_admin: bool = False,
    ) -> ResponseT:
        """`as_admin`: with the admin key in place of the token."""
        metadata = self._metadata(span, request_id, as_admin=as_admin)
        call = method(request, timeout=timeout, metadata=metadata)
        code = grpc.StatusCode.CANCELLED
        try:
            response = await call
            code = grpc.StatusCode.OK
            return response
        except asyncio.CancelledError:
            call.cancel()
            if self._closed and not _is_task_cancelled():
                raise CallCancelled("the client was closed", request_id=request_id) from None
            raise
        except grpc.aio.AioRpcError as error:
            code = error.code()
            raise error_from_rpc(error, request_id=request_id) from None
        finally:
            if span is not None:
                span.end(code)

    def open_stream(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[RequestT, ResponseT],
        request: RequestT,
        *,
        span: RpcSpan | None = None,
        request_id: str = "",
        timeout: float | None = None,
    ) -> StreamCall[ResponseT]:
        call = method(request, timeout=timeout, metadata=self._metadata(span, request_id))
        stream = StreamCall(call, span, request_id)
        self._streams.add(stream)
        return stream

    def _metadata(
        self, span: RpcSpan | None, request_id: str, *, as_admin: bool = False
    ) -> Metadata:
        metadata: Metadata = () if span is None else span.metadata
        if span is not None:
            span.goes_to(self._server)
        if request_id:
            metadata += (("x-request-id", request_id),)
        try:
            return metadata + self._authorization(as_admin=as_admin)
        except BaseException:
            if span is not None:
                span.end(grpc.StatusCode.UNAUTHENTICATED)
            raise

    def _authorization(self, *, as_admin: bool) -> Metadata:
        """Asks for the token each time: its provider may have a newer one."""
        token = self.options.admin_key if as_admin else self.options.token
        if token is None:
            return ()
        return (("authorization", _bearer(token if isinstance(token, str) else token())),)


class StreamCall(Generic[ResponseT]):
    """One server-streaming rpc, read by one task at a time.

    Who opens it must see its end (None or an error) or `cancel` it. Dropping it cancels too, as
    a net under callers who leave a loop and forget; that happens whenever it is collected.
    """

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[RequestT, ResponseT],
        span: RpcSpan | None,
        request_id: str,
    ) -> None:
        self._call = call
        self._span = span
        self._request_id = request_id
        # The iterator, not call.read(): that one answers "end" once the status is known, even
        # where messages that arrived before it are still unread.
        self._messages = cast("AsyncGenerator[ResponseT, None]", aiter(call))
        self._net = weakref.finalize(self, _cancel_dropped, call, span, asyncio.get_running_loop())
        self._net.atexit = False

    async def read(self) -> ResponseT | None:
        """The next message, or None after the last one."""
        try:
            return await anext(self._messages)
        except StopAsyncIteration:
            self._ended(grpc.StatusCode.OK)
            return None
        except asyncio.CancelledError:
            if _is_task_cancelled():
                self.cancel(is_error=True)
                raise
            self._ended(grpc.StatusCode.CANCELLED)
            raise CallCancelled("the stream was closed", request_id=self._request_id) from None
        except grpc.aio.AioRpcError as error:
            self._ended(error.code())
            raise error_from_rpc(error, request_id=self._request_id) from None

    def cancel(self, *, is_error: bool = False) -> None:
        """Tells the engine that nobody reads on; safe at any time, also twice or after the end."""
        self._call.cancel()
        self._ended(grpc.StatusCode.CANCELLED, is_error=is_error)

    def complete(self) -> None:
        """All that matters was read: what is left of the call is dropped without a failure."""
        self._call.cancel()
        self._ended(grpc.StatusCode.OK)

    def _ended(self, code: grpc.StatusCode, *, is_error: bool = True) -> None:
        self._net.detach()
        if self._span is not None:
            self._span.end(code, is_error=is_error)


def _cancel_dropped(
    call: grpc.aio.UnaryStreamCall[RequestT, ResponseT],
    span: RpcSpan | None,
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Runs wherever the collector runs, so that the loop's own thread has to do it."""
    if span is not None:
        span.end(grpc.StatusCode.CANCELLED)
    with contextlib.suppress(RuntimeError):  # the loop is closed, and its calls with it
        loop.call_soon_threadsafe(call.cancel)


def _is_task_cancelled() -> bool:
    """Whether a CancelledError is meant for this task; grpc raises one for a cancelled call too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _bearer(token: str) -> str:
    # grpc would refuse it as well, with the token in its message.
    if not token or not all("!" <= character <= "~" for character in token):
        raise ValueError("the token must be printable ASCII without spaces")
    return f"Bearer {token}"


def _new_channel(target: str, options: ClientOptions, tls: TlsOptions | None) -> grpc.aio.Channel:
    arguments: list[tuple[str, str | int]] = [
        ("grpc.keepalive_time_ms", _millis(options.keepalive_seconds)),
        ("grpc.keepalive_timeout_ms", _millis(options.keepalive_timeout_seconds)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", options.max_message_bytes),
        # A restarted engine is found again within about a second.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.min_reconnect_backoff_ms", _millis(options.connect_timeout_seconds)),
        # Retries are ours (`retry.py`); each client has a connection of its own, to the engine
        # itself: a proxy from the environment is for the web.
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(target, options=arguments)
    if tls.server_name is not None:
        arguments.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(target, _credentials(tls), options=arguments)


def _credentials(tls: TlsOptions) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=tls.root_certificates,
        private_key=tls.private_key,
        certificate_chain=tls.certificate_chain,
    )


def _millis(seconds: float) -> int:
    return max(1, round(seconds * 1_000))
