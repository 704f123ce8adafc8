"""Real OTLP receivers, over gRPC and over HTTP, made of opentelemetry-proto; what they get is told
in the form of the local store."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from traces.stored_spans import StoredSpan


class Received:
    """What came, and whether it is answered: `answers` cleared, calls hang until it is set."""

    def __init__(self) -> None:
        self.requests: list[pb.ExportTraceServiceRequest] = []
        self.num_hanging = 0
        self.answers = threading.Event()
        self.answers.set()

    def take(self, request: pb.ExportTraceServiceRequest) -> None:
        if self.answers.is_set():
            self.requests.append(request)
        else:
            self.num_hanging += 1
            self.answers.wait(60)

    def spans(self) -> dict[str, StoredSpan]:
        """By span id."""
        found = {}
        for request in list(self.requests):
            for of_resource in request.resource_spans:
                resource = _attributes(of_resource.resource.attributes)
                for scope in of_resource.scope_spans:
                    for span in scope.spans:
                        stored = _stored(span, resource)
                        assert stored["span_id"] not in found, "a span came twice"
                        found[stored["span_id"]] = stored
        return found


class _Servicer(pb_grpc.TraceServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        self._received.take(request)
        return pb.ExportTraceServiceResponse()


class GrpcReceiver:
    def __init__(self) -> None:
        self.received = Received()
        self._server = grpc.server(ThreadPoolExecutor(4))
        pb_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            _Servicer(self.received), self._server
        )
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def kill(self) -> None:
        self._server.stop(0).wait(5)

    def close(self) -> None:
        self.received.answers.set()
        self.kill()


@contextlib.contextmanager
def grpc_receiver() -> Iterator[GrpcReceiver]:
    with contextlib.closing(GrpcReceiver()) as receiver:
        yield receiver


@contextlib.contextmanager
def http_receiver() -> Iterator[tuple[str, Received]]:
    """Its endpoint, and what it gets."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            received.take(pb.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    finally:
        received.answers.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _stored(span: Span, resource: dict[str, Any]) -> StoredSpan:
    kind = Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_")
    code = Status.StatusCode.Name(span.status.code)
    return StoredSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex(),
        name=span.name,
        kind=kind,
        start_unix_ns=span.start_time_unix_nano,
        end_unix_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=[
            {
                "name": event.name,
                "unix_ns": event.time_unix_nano,
                "attributes": _attributes(event.attributes),
            }
            for event in span.events
        ],
        links=[
            {"trace_id": link.trace_id.hex(), "span_id": link.span_id.hex()} for link in span.links
        ],
        status={"code": code.removeprefix("STATUS_CODE_"), "message": span.status.message},
        service=resource["service.name"],
        pid=resource["process.pid"],
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, str(kind))
