"""From an address to the target it names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from clients.bench.grpc_target import grpc_target
from clients.bench.http_target import http_target
from clients.bench.target import Target, TargetOptions

GRPC_SCHEME = "grpc://"


@asynccontextmanager
async def open_target(address: str, options: TargetOptions) -> AsyncIterator[Target]:
    """`http://…`, `https://…` or `grpc://HOST:PORT`. Raises TargetError."""
    if address.startswith(GRPC_SCHEME):
        async with grpc_target(address.removeprefix(GRPC_SCHEME), options) as engine:
            yield engine
    else:
        async with http_target(address, options) as server:
            yield server
