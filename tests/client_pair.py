"""A scripted engine and a client of it, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from clients import (
    ClientOptions,
    EngineClient,
    GenerateEvent,
    GenerateRequest,
    GenerateStream,
    SamplingParams,
)
from clients.testing import FakeEngine

QUICK = ClientOptions(initial_backoff_seconds=0.02)


@asynccontextmanager
async def connected(
    options: ClientOptions = QUICK, *, fake: FakeEngine | None = None
) -> AsyncIterator[tuple[FakeEngine, EngineClient]]:
    async with (
        fake or FakeEngine() as engine,
        EngineClient(engine.target, options=options) as client,
    ):
        yield engine, client


def prompt(request_id: str = "", *, n: int | None = None) -> GenerateRequest:
    return GenerateRequest(prompt=(1, 2, 3), request_id=request_id, sampling=SamplingParams(n=n))


async def all_events(stream: GenerateStream) -> list[GenerateEvent]:
    async with stream:
        return [event async for event in stream]
