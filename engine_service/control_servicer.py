"""firsttoken.v1.Control: what operators may do to a running engine, behind a credential of its own.

The admin key comes as bearer token; its SHA-256 is all that is kept of the right one, and digests
are compared in a time that depends on neither. Without a configured key nobody gets in.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable
from typing import TypeVar

import grpc

from engine_service.engine_actor import EngineActor
from engine_service.errors import PermissionDenied
from engine_service.grpc_status import errors_as_status
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext


class ControlServicer(pb_grpc.ControlServicer):
    def __init__(
        self, actor: EngineActor, admin_key_digest: bytes, begin_drain: Callable[[], None]
    ) -> None:
        self._actor = actor
        self._admin_key_digest = admin_key_digest  # empty: there is no key
        self._begin_drain = begin_drain

    async def FlushPrefixCache(
        self,
        request: pb.FlushPrefixCacheRequest,
        context: Context[pb.FlushPrefixCacheRequest, pb.FlushPrefixCacheResponse],
    ) -> pb.FlushPrefixCacheResponse:
        async with errors_as_status(context):
            self._check_credential(context)
            num_blocks = await self._actor.flush_prefix_cache()
            logger.info("prefix cache flushed on request: %d blocks", num_blocks)
        return pb.FlushPrefixCacheResponse(num_blocks=num_blocks)

    async def Drain(
        self, request: pb.DrainRequest, context: Context[pb.DrainRequest, pb.DrainResponse]
    ) -> pb.DrainResponse:
        """Answers at once; asking twice is no error."""
        async with errors_as_status(context):
            self._check_credential(context)
            self._actor.drain()
            self._begin_drain()
            logger.info("draining on request")
        return pb.DrainResponse(num_requests=self._actor.num_requests)

    def _check_credential(self, context: Context[Request, Response]) -> None:
        if not self._admin_key_digest:
            raise PermissionDenied("this engine has no admin key, so that nobody may control it")
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        text = given if isinstance(given, str) else ""
        scheme, _, key = text.partition(" ")
        digest = hashlib.sha256(key.strip().encode(errors="surrogateescape")).digest()
        is_right = hmac.compare_digest(digest, self._admin_key_digest)
        if not (is_right and scheme.lower() == "bearer"):
            logger.warning("a call of Control was refused: no or wrong admin key")
            raise PermissionDenied("Control takes the engine's admin key, as bearer token")
