"""Who calls the gRPC edge, by the bearer token of the call, and what that opens.

Engine      a key, where keys are asked for (`KeyInterceptor`)
Control     an admin key, always (`control_servicer.py`)
Health      nothing: probes have no key, and learn no more than whether we serve
reflection  as Engine
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

import grpc

from access.key_store import KeyStore
from access.keys import ApiKey, admin_key, trusted_key
from engine_service.config import ServiceConfig
from engine_service.errors import PermissionDenied, Unauthenticated
from engine_service.grpc_status import to_status
from protos import engine_pb2 as pb

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")
Metadata = Iterable[tuple[str, str | bytes]]
Handler = grpc.RpcMethodHandler

_OPEN_SERVICES: Final = ("/grpc.health.v1.Health/",)
_CONTROL: Final = "/firsttoken.v1.Control/"


class Callers:
    """Raises KeysFileError when it is made."""

    def __init__(self, config: ServiceConfig) -> None:
        edge, admin = config.edge, config.admin_key_digest
        trusted = edge.trusted_key_digest
        self.keys = KeyStore(
            (*edge.api_keys, *((trusted_key(trusted),) if trusted else ())),
            extra_keys=(admin_key(admin),) if admin else (),
            path=edge.api_keys_file,
        )

    def caller(self, metadata: Metadata) -> ApiKey | None:
        """None where keys are not asked for and none that we know is given.

        Raises Unauthenticated.
        """
        key = self.keys.find(_bearer_token(metadata))
        if key is None and self.keys.is_required:
            raise Unauthenticated("no valid API key: send it as bearer token")
        return key

    def check_admin(self, metadata: Metadata) -> None:
        """Raises PermissionDenied."""
        if not self.keys.has_admin:
            raise PermissionDenied("this engine has no admin key, so that nobody may control it")
        key = self.keys.find(_bearer_token(metadata))
        if key is None or not key.is_admin:
            logger.warning("a call of Control was refused: no or wrong admin key")
            raise PermissionDenied("Control takes the engine's admin key, as bearer token")

    def own(self, request: pb.GenerateRequest, metadata: Metadata) -> ApiKey | None:
        """Makes the request the caller's: its tenant, and a priority that its key allows. Returns
        the key, as `caller`.

        Whoever fronts for others says itself for which tenant a request is. Raises PermissionDenied
        for a plain key that names a tenant other than its own, and Unauthenticated.
        """
        key = self.caller(metadata)
        if key is None:
            return None  # the engine is open: who calls it is trusted
        if not key.is_trusted:
            if request.tenant not in ("", key.tenant):
                raise PermissionDenied(
                    "this key makes requests of its own tenant only", field="tenant"
                )
            request.tenant = key.tenant
        priority = key.priority(request.priority if request.HasField("priority") else None)
        if priority is not None:
            request.priority = priority
        return key


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # only in its stubs
    """Before any handler: a call without a key is refused, whatever it calls."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler[Request, Response]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler[Request, Response]:
        handler = await continuation(handler_call_details)
        if handler_call_details.method.startswith((*_OPEN_SERVICES, _CONTROL)):
            return handler
        try:
            self._callers.caller(handler_call_details.invocation_metadata or ())
        except Unauthenticated as error:
            return _refusing(error, handler)
        return handler


def _refusing(
    error: Unauthenticated, handler: Handler[Request, Response] | None
) -> Handler[Request, Response]:
    """Ends the call with its status; of the kind of `handler`, None for an unknown method."""
    status = to_status(error)

    async def refuse(_: object, context: grpc.aio.ServicerContext[Request, Response]) -> Response:
        await context.abort(status.code, status.details, status.trailing_metadata)

    if handler is not None and handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler is not None and handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)


def _bearer_token(metadata: Metadata) -> str:
    """Empty: there is none."""
    given = dict(metadata).get("authorization", "")
    scheme, _, token = (given if isinstance(given, str) else "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
