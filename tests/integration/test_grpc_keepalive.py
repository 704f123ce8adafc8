"""Connections on which nothing happens for a while: pings are no offence."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.conftest import MakeTinyModel
from tests.serving import serve

PING_MS = 10_000  # as often as the server promises to accept
QUIET_SECONDS = 65.0  # gRPC's own limits would end the connection at the third ping or so


@pytest.mark.slow
async def test_a_call_without_data_outlives_pings_every_ten_seconds(
    tiny_model_dir: MakeTinyModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with serve(tiny_model_dir("llama"), tmp_path_factory.mktemp("keepalive")) as served:
        options = [
            ("grpc.keepalive_time_ms", PING_MS),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        async with grpc.aio.insecure_channel(served.grpc, options=options) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            first = await watch.read()
            assert first.status == health_pb2.HealthCheckResponse.SERVING
            reading = asyncio.ensure_future(watch.read())
            done, _ = await asyncio.wait([reading], timeout=QUIET_SECONDS)
            assert not done, "the connection was ended"
            reading.cancel()
            assert channel.get_state() is grpc.ChannelConnectivity.READY
