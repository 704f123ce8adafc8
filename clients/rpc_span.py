"""One CLIENT span per rpc, by OpenTelemetry's API alone.

The parent is taken where the call is made and the span is never attached as the current one:
a stream's events are read by whoever reads them, and its context must not leak there.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode

from traces import names
from traces.clock import now_unix_ns
from traces.propagation import inject

ENGINE = "firsttoken.v1.Engine"
CONTROL = "firsttoken.v1.Control"

_tracer = trace.get_tracer("firsttoken.clients")


def server_attributes(target: str) -> Mapping[str, str | int]:
    """Which server an rpc goes to, from what gRPC takes."""
    host, colon, port = target.rpartition(":")
    if colon and port.isdigit():
        return {names.SERVER_ADDRESS: host, names.SERVER_PORT: int(port)}
    return {names.SERVER_ADDRESS: target}


class RpcSpan:
    """Ends exactly once, with the status of the rpc."""

    def __init__(
        self, method: str, parent: Context, *, request_id: str = "", service: str = ENGINE
    ) -> None:
        attributes = {
            names.RPC_SYSTEM: "grpc",
            names.RPC_SERVICE: service,
            names.RPC_METHOD: method,
        }
        if request_id:
            attributes[names.REQUEST_ID] = request_id
        self._span = _tracer.start_span(
            f"{service}/{method}",
            context=parent,
            kind=SpanKind.CLIENT,
            attributes=attributes,
            start_time=now_unix_ns(),
        )
        self.metadata = inject(trace.set_span_in_context(self._span, parent))
        self._ended = False

    @classmethod
    def inside_trace(cls, method: str, *, service: str = ENGINE) -> RpcSpan | None:
        """For calls about the engine: they belong to a trace that is there, and start none."""
        parent = otel_context.get_current()
        if not trace.get_current_span(parent).get_span_context().is_valid:
            return None
        return cls(method, parent, service=service)

    def goes_to(self, server: Mapping[str, str | int]) -> None:
        """`server`: of `server_attributes`."""
        self._span.set_attributes(server)

    def first_token_received(self) -> None:
        if self._span.is_recording():
            self._span.add_event(names.EVENT_FIRST_TOKEN_RECEIVED, timestamp=now_unix_ns())

    def end(self, code: grpc.StatusCode, *, is_error: bool = True) -> None:
        """`is_error=False` for a stream that was left on purpose, its work done."""
        if self._ended:
            return
        self._ended = True
        number: int = code.value[0]
        self._span.set_attribute(names.RPC_GRPC_STATUS_CODE, number)
        if code is not grpc.StatusCode.OK and is_error:
            self._span.set_attribute(names.ERROR_TYPE, code.name)
            self._span.set_status(Status(StatusCode.ERROR, code.name))
        self._span.end(now_unix_ns())
