"""All engines of a facade, and which model each one serves.

    --engine chat=a:1 --engine chat=b:1 --engine dns:pool:1        --served-model-name gpt

        name   chat  --> a:1, b:1                                  gpt --> chat, the first one's
               Llama --> 10.0.0.7:1, 10.0.0.8:1      (the addresses of pool, which say Llama)

A dns: address is resolved again every few seconds: its engines come and go with the name's
addresses. What engines of one name have in common is in `replicas.py`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from clients.engine_client import EngineClient
from clients.options import ClientOptions, TlsOptions
from http_facade.engine import EngineConnection, ServedModel
from http_facade.engine_address import EngineAddress
from http_facade.errors import model_not_found, unavailable
from http_facade.replicas import common_model, warn_if_they_differ
from http_facade.routing_metrics import RoutingMetrics
from http_facade.tokenizer_shelf import TokenizerShelf

_RESOLVE_SECONDS = 5.0

MakeClient = Callable[[str, EngineAddress], EngineClient]  # from host:port, and whose it is
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # host and port to host:port of each

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Seat:
    engine: EngineConnection
    following: asyncio.Task[None]


@dataclass(slots=True)
class _Group:
    """The engines of one `--engine`."""

    address: EngineAddress
    seats: dict[str, _Seat] = field(default_factory=dict)  # by target

    @property
    def engines(self) -> list[EngineConnection]:
        return [seat.engine for seat in self.seats.values()]

    @property
    def model_name(self) -> str:
        """Empty as long as it is not known."""
        names = (engine.model_name for engine in self.engines)
        return self.address.model_name or next(filter(None, names), "")


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    addresses = sorted({str(address[0]) for *_, address in found})
    return [f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in addresses]


def engine_clients(options: ClientOptions) -> MakeClient:
    """Every attempt at an engine is one: `placement.py` decides where the next one goes."""

    def make(target: str, address: EngineAddress) -> EngineClient:
        tls = options.tls
        if tls is not None and address.is_dns:
            tls = _verified_for(address.host, tls)  # the certificate's name, which is no address
        return EngineClient(target, options=replace(options, tls=tls, max_attempts=1))

    return make


def _verified_for(
    host: str, tls: TlsOptions | Callable[[], TlsOptions]
) -> TlsOptions | Callable[[], TlsOptions]:
    def named(given: TlsOptions) -> TlsOptions:
        return given if given.server_name is not None else replace(given, server_name=host)

    return (lambda: named(tls())) if callable(tls) else named(tls)


class EnginePool:
    def __init__(
        self,
        addresses: Sequence[EngineAddress],
        make_client: MakeClient,
        *,
        aliases: Sequence[str] = (),
        metrics: RoutingMetrics,
        resolve: Resolve = resolve_host,
    ) -> None:
        """`aliases` are further names of the first address's model."""
        self._groups = [_Group(address) for address in addresses]
        self._make_client = make_client
        self._aliases = tuple(aliases)
        self._metrics = metrics
        self._resolve = resolve
        self._tokenizers = TokenizerShelf()
        self._tasks: set[asyncio.Task[None]] = set()  # that resolve names, and that see engines off

    @property
    def engines(self) -> list[EngineConnection]:
        """In the order of their addresses."""
        return [engine for group in self._groups for engine in group.engines]

    # ------------------------------------------------------------ which engines

    @property
    def is_any_ready(self) -> bool:
        return any(engine.is_ready for engine in self.engines)

    def ready(self, name: str) -> list[EngineConnection]:
        """Those that serve the model of that name now."""
        name = self._without_alias(name)
        return [e for e in self.engines if e.is_ready and e.model_name == name]

    # ------------------------------------------------------------ which models

    def names(self) -> tuple[str, ...]:
        """Of every model that was ever ready, and its aliases. Raises ApiError 503 if none was."""
        met = [engine.model_name for engine in self.engines if engine.model is not None]
        if not met:
            raise unavailable("the engine is not there yet")
        aliases = self._aliases if self._groups[0].model_name in met else ()
        return tuple(dict.fromkeys((*met, *aliases)))

    def model(self, name: str) -> ServedModel:
        """What its engines have in common; of the last time they were there, if none is now.

        Raises ApiError: 404 for an unknown name, 503 for one that may yet become known.
        """
        name = self._without_alias(name)
        met = [engine for engine in self.engines if engine.model_name == name and engine.model]
        if not met:
            if self._may_be_known_later(name):
                raise unavailable("no engine of this model is there yet")
            raise model_not_found(name)
        return common_model(met)

    def default_model(self) -> ServedModel:
        """The first address's. Raises ApiError 503 as long as that was never ready."""
        name = self._groups[0].model_name
        if not name:
            raise unavailable("the engine is not there yet")
        return self.model(name)

    def _without_alias(self, name: str) -> str:
        if name in self._aliases and not any(name == engine.model_name for engine in self.engines):
            return self._groups[0].model_name
        return name

    def _may_be_known_later(self, name: str) -> bool:
        """It was given a name that has not been met, or there are engines that have not said
        what they serve."""
        return any(group.model_name in ("", name) for group in self._groups)

    # ------------------------------------------------------------ life

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follows the engines inside the block, and closes their clients after it."""
        for group in self._groups:
            if group.address.is_dns:
                self._spawn(self._follow_name(group))
            else:
                self._join(group, group.address.target)
        try:
            yield
        finally:
            followings = [seat.following for group in self._groups for seat in group.seats.values()]
            await _cancel([*self._tasks, *followings])
            for engine in self.engines:
                await engine.client.close()

    async def _follow_name(self, group: _Group) -> None:
        """Runs until cancelled. While the name can't be resolved its engines stay."""
        address, is_failing = group.address, False
        while True:
            try:
                targets = await self._resolve(address.host, address.port)
            except (OSError, UnicodeError) as error:
                if not is_failing:
                    logger.warning("engine %s can't be resolved: %s", address, error)
                is_failing = True
            else:
                is_failing = False
                for target in sorted(set(targets) - set(group.seats)):
                    self._join(group, target)
                for target in set(group.seats) - set(targets):
                    self._leave(group, target)
            await asyncio.sleep(_RESOLVE_SECONDS)

    def _join(self, group: _Group, target: str) -> None:
        logger.info("engine %s joins (%s)", target, group.address)
        engine = EngineConnection(
            target,
            self._make_client(target, group.address),
            model_name=group.address.model_name,
            tokenizers=self._tokenizers,
            on_change=self._changed,
        )
        group.seats[target] = _Seat(engine, asyncio.create_task(engine.follow()))
        self._metrics.engine_ready(target, is_ready=False)

    def _leave(self, group: _Group, target: str) -> None:
        """It gets nothing more; what runs there may end."""
        logger.info("engine %s leaves (%s)", target, group.address)
        self._spawn(self._see_off(group.seats.pop(target)))

    async def _see_off(self, seat: _Seat) -> None:
        try:
            await seat.engine.wait_idle()
        finally:
            await _cancel([seat.following])
            await seat.engine.client.close()
        if all(engine.target != seat.engine.target for engine in self.engines):
            self._metrics.forget_engine(seat.engine.target)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ what changes

    def _changed(self, changed: EngineConnection) -> None:
        self._metrics.engine_ready(changed.target, is_ready=changed.is_ready)
        if changed.is_ready:
            warn_if_they_differ(changed.model_name, self.ready(changed.model_name))


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
