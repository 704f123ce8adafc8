"""Where an OTLP endpoint is, and which of the two protocols it speaks, told as OpenTelemetry's own
environment variables tell it.

    $OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, else $OTEL_EXPORTER_OTLP_PROTOCOL: grpc or http/protobuf
    neither is set: an endpoint with a path speaks HTTP, one without gRPC

    HOST:4317, http://HOST:4317         gRPC
    https://HOST:4317                   gRPC over TLS
    http(s)://HOST:4318/v1/traces       HTTP

Headers, certificates, compression and timeouts are those of OpenTelemetry's variables, too
(`OTEL_EXPORTER_OTLP_HEADERS`, ...).
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

GRPC: Final = "grpc"
HTTP: Final = "http/protobuf"
_PROTOCOL_VARIABLES: Final = (
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
)
_HTTP_PATH: Final = "/v1/traces"


@dataclass(frozen=True, slots=True)
class OtlpTarget:
    protocol: str  # GRPC or HTTP
    url: str


def otlp_target(endpoint: str) -> OtlpTarget:
    """Raises ValueError, which names what is wrong."""
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    try:
        parts = urlsplit(url)
        has_port = parts.port is not None
    except ValueError:
        has_port = False
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"an OTLP endpoint is HOST:PORT, or a URL with http or https, not {endpoint!r}"
        )
    path = parts.path.rstrip("/")
    protocol = _told_protocol() or (HTTP if path else GRPC)
    if protocol == GRPC and path:
        raise ValueError(f"an OTLP endpoint for gRPC has no path, unlike {endpoint!r}")
    if protocol == GRPC and not has_port:
        raise ValueError(f"an OTLP endpoint for gRPC needs its port, usually 4317: {endpoint!r}")
    return OtlpTarget(
        protocol, url if path or protocol == GRPC else f"{url.rstrip('/')}{_HTTP_PATH}"
    )


def otlp_flag(text: str) -> str | None:
    """The value of a command line's flag; None for an empty one. Raises ArgumentTypeError."""
    try:
        return text if text and otlp_target(text) else None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Raises ValueError for an endpoint that is none. That nobody listens is no error."""
    target = otlp_target(endpoint)
    if target.protocol == HTTP:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

        return http.OTLPSpanExporter(endpoint=target.url)
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

    is_plain = target.url.startswith("http://")
    return grpc.OTLPSpanExporter(endpoint=target.url, insecure=is_plain)


def _told_protocol() -> str:
    """Empty: no variable tells it."""
    for variable in _PROTOCOL_VARIABLES:
        if protocol := os.environ.get(variable, ""):
            if protocol not in (GRPC, HTTP):
                raise ValueError(f"${variable} must be {GRPC} or {HTTP}, not {protocol!r}")
            return protocol
    return ""
