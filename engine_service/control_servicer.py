"""firsttoken.v1.Control: what operators may do to a running engine, behind a credential of its own.

An admin key comes as bearer token; `callers.py` knows the right ones. Without a configured one
nobody gets in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import grpc

from engine_service.callers import Callers
from engine_service.engine_actor import EngineActor
from engine_service.grpc_status import errors_as_status
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext


class ControlServicer(pb_grpc.ControlServicer):
    def __init__(
        self, actor: EngineActor, callers: Callers, begin_drain: Callable[[], None]
    ) -> None:
        self._actor = actor
        self._callers = callers
        self._begin_drain = begin_drain

    async def FlushPrefixCache(
        self,
        request: pb.FlushPrefixCacheRequest,
        context: Context[pb.FlushPrefixCacheRequest, pb.FlushPrefixCacheResponse],
    ) -> pb.FlushPrefixCacheResponse:
        async with errors_as_status(context):
            self._callers.check_admin(context.invocation_metadata() or ())
            num_blocks = await self._actor.flush_prefix_cache()
            logger.info("prefix cache flushed on request: %d blocks", num_blocks)
        return pb.FlushPrefixCacheResponse(num_blocks=num_blocks)

    async def Drain(
        self, request: pb.DrainRequest, context: Context[pb.DrainRequest, pb.DrainResponse]
    ) -> pb.DrainResponse:
        """Answers at once; asking twice is no error."""
        async with errors_as_status(context):
            self._callers.check_admin(context.invocation_metadata() or ())
            self._actor.drain()
            self._begin_drain()
            logger.info("draining on request")
        return pb.DrainResponse(num_requests=self._actor.num_requests)
