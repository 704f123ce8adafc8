"""Engines that are the addresses of a name: they come and go with it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from clients.engine_client import EngineClient
from clients.options import ClientOptions, TlsOptions
from clients.testing import Accept, Emit, FakeEngine, Hang, Script
from clients.types import GenerateRequest
from http_facade import engine_pool
from http_facade.engine_address import parse_engine
from http_facade.engine_pool import EnginePool, engine_clients
from http_facade.errors import ApiError
from http_facade.placement import Placement
from http_facade.routing import Router
from http_facade.routing_metrics import RoutingMetrics
from tests.facade_harness import MODEL
from tests.pool_harness import facade_and_fakes


class Names:
    """A name service that the test writes."""

    def __init__(self) -> None:
        self.targets: list[str] | None = None

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("engines.example", 50051)
        if self.targets is None:
            raise OSError("no such name")
        return self.targets


async def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def _resolved_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "_RESOLVE_SECONDS", 0.1)


@asynccontextmanager
async def pool_and_fakes(
    model_dir: Path, names: Names, count: int
) -> AsyncIterator[tuple[EnginePool, Placement, list[FakeEngine], CollectorRegistry]]:
    async with contextlib.AsyncExitStack() as stack:
        fakes = [FakeEngine(model_dir, model=MODEL) for _ in range(count)]
        for fake in fakes:
            await stack.enter_async_context(fake)
        registry = CollectorRegistry()
        metrics = RoutingMetrics(registry)
        pool = EnginePool(
            [parse_engine("dns:engines.example:50051")],
            engine_clients(ClientOptions()),
            metrics=metrics,
            resolve=names.resolve,
        )
        await stack.enter_async_context(pool.following())
        yield pool, Placement(pool, Router("prefix"), metrics), fakes, registry


async def test_engines_come_and_go_with_the_names_addresses(
    embedded_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = Names()
    async with pool_and_fakes(embedded_model_dir, names, 2) as (pool, placement, fakes, registry):
        first, second = fakes
        digest = first.tokenizer.digest
        request = GenerateRequest(prompt=[5] * 64, model=MODEL, tokenizer_digest=digest)
        await asyncio.sleep(0.3)
        with pytest.raises(ApiError) as caught:
            pool.model(MODEL)  # it may yet come
        assert caught.value.status == 503
        assert caplog.text.count("can't be resolved") == 1  # not each time

        names.targets = [first.target]
        await until(lambda: len(pool.ready(MODEL)) == 1)
        assert pool.names() == (MODEL,)
        names.targets = [first.target, second.target]
        await until(lambda: len(pool.ready(MODEL)) == 2)
        with pytest.raises(ApiError) as caught:
            pool.model("other")
        assert caught.value.status == 404

        # a request runs at the first when its address goes: it ends in peace, nothing new comes
        first.script(Script((Accept(), Emit([7]), Hang())))
        names.targets = [first.target]
        await until(lambda: len(pool.ready(MODEL)) == 1)
        async with placement.accepted(request, MODEL) as placed:
            assert placed.engine.target == first.target
            names.targets = [second.target]
            await until(lambda: [e.target for e in pool.ready(MODEL)] == [second.target])
            await asyncio.sleep(0.3)
            assert first.num_open_calls == 1
            assert f'engine="{first.target}"' in generate_latest(registry).decode()
            async with placement.accepted(request, MODEL) as other:
                assert other.engine.target == second.target
        await until(lambda: first.num_open_calls == 0)
        ready = f'firsttoken_engine_ready{{engine="{first.target}"}}'
        await until(lambda: ready not in generate_latest(registry).decode())

        # a name service that fails takes nothing away
        names.targets = None
        await asyncio.sleep(0.3)
        assert [e.target for e in pool.ready(MODEL)] == [second.target]


async def test_a_facade_finds_its_engine_by_a_name(embedded_model_dir: Path) -> None:
    async with facade_and_fakes(
        embedded_model_dir,
        MODEL,
        addresses=lambda fakes: [parse_engine(f"dns:localhost:{fakes[0].target.split(':')[1]}")],
        wait=False,
    ) as pool:
        await pool.facade.wait_ready()
        _, raw, _ = await pool.facade.get("/v1/models")
        assert MODEL.encode() in raw


@pytest.mark.parametrize("tls", [TlsOptions(), TlsOptions], ids=["given", "provided"])
async def test_the_certificate_of_a_named_engine_is_the_names(
    tls: TlsOptions | Callable[[], TlsOptions],
) -> None:
    make = engine_clients(ClientOptions(tls=tls))
    by_name = make("10.0.0.1:50051", parse_engine("dns:engines.example:50051"))
    by_address = make("a.example:50051", parse_engine("a.example:50051"))
    assert [server_name(client) for client in (by_name, by_address)] == ["engines.example", None]


def server_name(client: EngineClient) -> str | None:
    tls = client._options.tls
    assert tls is not None
    return (tls() if callable(tls) else tls).server_name
