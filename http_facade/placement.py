"""How a call gets to an engine that accepts it.

    pick an engine, open --> refused or lost before Accepted --> pick among those not tried yet ...
                         --> Accepted --> the stream is the caller's; nothing is retried any more

An engine that is full or out of reach costs a call nothing while another has room. When none is
left, the caller gets the smallest hint of when to come back. Only where every engine was out of
reach without saying for how long (connections break), all are tried again after a short pause.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from opentelemetry import trace

from clients.errors import (
    EngineClientError,
    EngineUnavailable,
    QueueFull,
    RateLimited,
    TokenizerStale,
)
from clients.generate_stream import GenerateStream
from clients.options import ClientOptions
from clients.retry import Deadline, RetryPolicy
from clients.types import GenerateRequest
from http_facade.engine import EngineConnection
from http_facade.engine_pool import EnginePool
from http_facade.prefix_key import PrefixKey, hint_key, prefix_key
from http_facade.routing import Router
from http_facade.routing_metrics import RoutingMetrics
from traces import names

# Of a call, where no engine can be reached: attempts and pauses as a client makes them by itself.
_ROUNDS = RetryPolicy.from_options(ClientOptions(max_retry_wait_seconds=0.0))

_REASONS = {
    EngineUnavailable: "unavailable",
    QueueFull: "queue_full",
    RateLimited: "queue_full",
    TokenizerStale: "tokenizer_stale",
}
_TELLING = (TokenizerStale, QueueFull)  # what a caller should know before all else


@dataclass(frozen=True, slots=True)
class _Failure:
    engine: EngineConnection
    reason: str  # one of _REASONS
    error: EngineClientError


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """An accepted call, open as long as the block that asked for it."""

    engine: EngineConnection
    stream: GenerateStream


class Placement:
    def __init__(self, pool: EnginePool, router: Router, metrics: RoutingMetrics) -> None:
        self._pool = pool
        self._router = router
        self._metrics = metrics

    @asynccontextmanager
    async def accepted(
        self,
        request: GenerateRequest,
        model_name: str,
        *,
        cache_key: str | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[PlacedCall]:
        """`cache_key`: the caller's word for what belongs together. `timeout` in seconds, for all
        attempts and the whole answer.

        Raises the refusal that tells most when no engine takes the call; TokenizerStale when none
        has its tokenizer any more, and the engines' new ones are known.
        """
        search = _Search(self._pool, self._router, self._metrics, model_name, request, cache_key)
        deadline = Deadline(timeout)
        while True:
            engine = await search.next_engine(deadline)
            request_now = search.request_for(engine)
            call = engine.client.generate(request_now, timeout=deadline.remaining_seconds())
            with engine.working(search.num_samples):
                async with call as stream:
                    try:
                        async with engine.while_there():
                            await stream.wait_accepted()
                    except (EngineUnavailable, QueueFull, TokenizerStale) as error:
                        failure = error
                    else:
                        self._metrics.accepted(engine.target)
                        yield PlacedCall(engine, stream)
                        return
            await search.failed(engine, failure)


class _Search:
    """One call on its way."""

    def __init__(
        self,
        pool: EnginePool,
        router: Router,
        metrics: RoutingMetrics,
        model_name: str,
        request: GenerateRequest,
        cache_key: str | None,
    ) -> None:
        self._pool = pool
        self._router = router
        self._metrics = metrics
        self._model_name = model_name
        self._request = request
        self._cache_key = cache_key
        self.num_samples = request.sampling.n or 1
        self._num_attempts = 0
        self._round = 1
        self._tried: set[str] = set()  # targets, of this round
        self._failures: list[_Failure] = []

    async def next_engine(self, deadline: Deadline) -> EngineConnection:
        """Raises what the engines refused the call with, when none is left."""
        if not (untried := self._untried()) and await self._begins_anew(deadline):
            untried = self._untried()
        if not untried:
            raise self._refusal()
        by_key = self._router.wants_key and len(untried) > 1
        engine, affinity = self._router.pick(
            untried, self._key() if by_key else None, self.num_samples
        )
        if self._failures:
            self._rerouted(self._failures[-1])
        elif by_key:
            self._metrics.placed(affinity)
        self._num_attempts += 1
        self._tried.add(engine.target)
        return engine

    def request_for(self, engine: EngineConnection) -> GenerateRequest:
        """Engines may call their models differently; and a later attempt has an id of its own:
        the engine may still be cleaning up after the earlier one, and a live id is refused."""
        request = self._request
        if engine.model is not None and engine.model.info.model != request.model:
            request = replace(request, model=engine.model.info.model)
        if self._num_attempts > 1:
            request = replace(request, request_id=f"{request.request_id}-r{self._num_attempts}")
        return request

    async def failed(self, engine: EngineConnection, error: EngineClientError) -> None:
        """Raises the error where no other engine would do better."""
        if isinstance(error, QueueFull) and error.retry_after_seconds is None:
            raise error  # coming again does not mend it
        reason = _REASONS[type(error)]
        # unless another call did so while this one was on its way
        if isinstance(error, TokenizerStale) and engine in self._ready():
            try:
                await engine.refresh()
            except EngineClientError as failure:
                error = failure  # nothing new is known of it
        self._failures.append(_Failure(engine, reason, error))

    async def _begins_anew(self, deadline: Deadline) -> bool:
        """Waits a little and lets all be tried again, where that may help."""
        refusal = self._refusal()
        if not self._failures or not isinstance(refusal, EngineUnavailable) or not self._ready():
            return False
        pause_seconds = _ROUNDS.delay_seconds(self._round, refusal, random.random())
        if pause_seconds is None or not deadline.leaves(pause_seconds):
            return False
        await asyncio.sleep(pause_seconds)
        self._round += 1
        self._tried.clear()
        return True

    def _refusal(self) -> EngineClientError:
        """The failure that tells the caller most, with the smallest hint of all."""
        if not self._failures:
            if self._pool.ready(self._model_name):
                return TokenizerStale("no engine has this tokenizer any more")
            return EngineUnavailable(
                "no engine of this model is ready", reason="ENGINE_UNAVAILABLE"
            )
        errors = [failure.error for failure in self._failures]
        told = [e for kind in _TELLING for e in errors if isinstance(e, kind)]
        refusal = told[0] if told else errors[-1]
        hints = [hint for e in errors if (hint := e.retry_after_seconds) is not None]
        refusal.retry_after_seconds = min(hints, default=None)
        return refusal

    def _rerouted(self, failure: _Failure) -> None:
        self._metrics.rerouted(failure.reason)
        host, _, port = failure.engine.target.rpartition(":")
        trace.get_current_span().add_event(
            names.EVENT_REROUTED,
            {
                names.REROUTE_REASON: failure.reason,
                names.SERVER_ADDRESS: host,
                names.SERVER_PORT: int(port),
            },
        )

    def _ready(self) -> list[EngineConnection]:
        """Those whose tokens the request is made of."""
        digest = self._request.tokenizer_digest
        return [
            engine
            for engine in self._pool.ready(self._model_name)
            if engine.model is not None and engine.model.info.tokenizer_digest == digest
        ]

    def _untried(self) -> list[EngineConnection]:
        return [engine for engine in self._ready() if engine.target not in self._tried]

    def _key(self) -> PrefixKey | None:
        request = self._request
        if self._cache_key is not None:
            return hint_key(self._cache_key, tenant=request.tenant, cache_salt=request.cache_salt)
        if isinstance(request.prompt, str):
            return None
        return prefix_key(request.prompt, tenant=request.tenant, cache_salt=request.cache_salt)
