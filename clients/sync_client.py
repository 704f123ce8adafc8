"""The synchronous twin of EngineClient: the same client, driven by an event loop on a thread.

Names and signatures are those of `EngineClient` (a test compares them); `aclose` is `close` and
`async with` is `with`. Usable from several threads; each stream is read by one at a time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Sequence
from types import TracebackType
from typing import Self, TypeVar

from clients.engine_client import EngineClient
from clients.errors import CallCancelled
from clients.generate_stream import GenerateStream
from clients.options import ClientOptions
from clients.types import (
    Accepted,
    GenerateEvent,
    GenerateRequest,
    LoadReport,
    ModelInfo,
    ServerInfo,
    TokenizerBundle,
    Usage,
)

T = TypeVar("T")


class SyncEngineClient:
    def __init__(self, target: str, *, options: ClientOptions = ClientOptions()) -> None:  # noqa: B008
        self._client = EngineClient(target, options=options)
        self._loop = _LoopThread()

    def generate(
        self, request: GenerateRequest, *, timeout: float | None = None
    ) -> SyncGenerateStream:
        return SyncGenerateStream(self._client.generate(request, timeout=timeout), self._loop)

    def abort(self, request_id: str, indices: Sequence[int] = ()) -> None:
        self._loop.run(self._client.abort(request_id, indices))

    def keep_traces(self, trace_ids: Sequence[str]) -> None:
        self._loop.run(self._client.keep_traces(trace_ids))

    def get_model_info(self) -> ModelInfo:
        return self._loop.run(self._client.get_model_info())

    def get_server_info(self) -> ServerInfo:
        return self._loop.run(self._client.get_server_info())

    def get_load(self) -> LoadReport:
        return self._loop.run(self._client.get_load())

    def get_tokenizer(self, known_digest: str = "") -> TokenizerBundle | None:
        return self._loop.run(self._client.get_tokenizer(known_digest))

    def wait_ready(self, timeout: float) -> None:
        self._loop.run(self._client.wait_ready(timeout))

    def watch_load(self) -> Generator[LoadReport, None, None]:
        return self._loop.iterate(self._client.watch_load())

    def watch_health(self) -> Generator[bool, None, None]:
        return self._loop.iterate(self._client.watch_health())

    def flush_prefix_cache(self) -> int:
        return self._loop.run(self._client.flush_prefix_cache())

    def drain(self) -> int:
        return self._loop.run(self._client.drain())

    def close(self) -> None:
        """Ends open streams and the thread. Idempotent."""
        if self._loop.is_running():
            with contextlib.suppress(CallCancelled):  # another thread was quicker
                self._loop.run(self._client.close())
        self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class SyncGenerateStream:
    def __init__(self, stream: GenerateStream, loop: _LoopThread) -> None:
        self._stream = stream
        self._loop = loop

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def accepted(self) -> Accepted | None:
        return self._stream.accepted

    @property
    def usage(self) -> Usage | None:
        return self._stream.usage

    def wait_accepted(self) -> Accepted:
        return self._loop.run(self._stream.wait_accepted())

    def close(self, *, is_error: bool = False) -> None:
        if self._loop.is_running():
            self._loop.run(self._stream.aclose(is_error=is_error))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GenerateEvent:
        event = self._loop.run(_next_or_none(self._stream))
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(is_error=exc is not None)


class _LoopThread:
    """An event loop on a daemon thread, started by its first use and stopped for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Its result. An interrupt of the waiting thread cancels it."""
        try:
            loop = self._running_loop()
        except CallCancelled:
            coroutine.close()
            raise
        # The task runs in a copy of the caller's context, so that spans find their parent.
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise CallCancelled("the client was closed") from None
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        try:
            while (item := self.run(_next_or_none(items))) is not None:
                yield item
        finally:
            if self.is_running():
                self.run(items.aclose())

    def is_running(self) -> bool:
        return self._loop is not None and not self._is_stopped

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            loop, self._loop = self._loop, None
        if loop is not None and self._stopping is not None and self._thread is not None:
            loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._is_stopped:
                raise CallCancelled("the client is closed")
            if self._loop is None:
                started = threading.Event()
                self._thread = threading.Thread(
                    target=lambda: asyncio.run(self._serve(started)),
                    name="firsttoken-client",
                    daemon=True,
                )
                self._thread.start()
                started.wait()
            assert self._loop is not None
            return self._loop

    async def _serve(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        started.set()
        await self._stopping.wait()


async def _next_or_none(items: AsyncIterator[T]) -> T | None:
    return await anext(items, None)
