"""The flags of who may reach the gRPC edge, and the configuration they make."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from access.keys import digest_of, is_writable, plain_keys
from engine_service.config import EdgeConfig

API_KEY_VARIABLE: Final = "FIRSTTOKEN_API_KEY"
TRUSTED_KEY_VARIABLE: Final = "FIRSTTOKEN_ENGINE_API_KEY"  # the facade sends it


def key(text: str) -> str:
    """A flag's type: what can travel in a header."""
    if not is_writable(text):
        raise argparse.ArgumentTypeError("must be printable ASCII without spaces")
    return text


def add_edge_flags(add: Callable[..., Any]) -> None:
    """`add`: a parser's add_argument."""
    add(
        "--api-key",
        type=key,
        action="append",
        default=None,
        help="key that every call but health checks needs; may be repeated "
        f"(or the environment variable {API_KEY_VARIABLE})",
    )
    add(
        "--api-keys-file",
        type=Path,
        help="YAML or JSON: keys with tenant and priority; read anew when it changes",
    )
    add(
        "--trusted-api-key",
        type=key,
        help="the facade's key, which says itself for which tenant a request is "
        f"(or the environment variable {TRUSTED_KEY_VARIABLE}, which a facade reads, too)",
    )
    add(
        *("--grpc-ssl-certfile", "--ssl-certfile"),
        dest="grpc_ssl_certfile",
        type=Path,
        help="PEM file: the certificate chain; read anew on a change",
    )
    add(
        *("--grpc-ssl-keyfile", "--ssl-keyfile"),
        dest="grpc_ssl_keyfile",
        type=Path,
        help="PEM file: the certificate's private key",
    )
    add(
        *("--grpc-ssl-ca-certs", "--ssl-ca-certs"),
        dest="grpc_ssl_ca_certs",
        type=Path,
        help="PEM file: clients need a certificate of one of these authorities (mutual TLS)",
    )


def edge_config(arguments: argparse.Namespace) -> EdgeConfig:
    """Raises ValueError for flags that can't go together, and for keys that can't travel."""
    certificate, private_key = arguments.grpc_ssl_certfile, arguments.grpc_ssl_keyfile
    if (certificate is None) != (private_key is None):
        raise ValueError("TLS takes both --ssl-certfile and --ssl-keyfile")
    if arguments.grpc_ssl_ca_certs is not None and certificate is None:
        raise ValueError("--ssl-ca-certs takes --ssl-certfile and --ssl-keyfile, too")
    trusted = arguments.trusted_api_key or _from_environment(TRUSTED_KEY_VARIABLE)
    plain = arguments.api_key or [it for it in [_from_environment(API_KEY_VARIABLE)] if it]
    return EdgeConfig(
        api_keys=plain_keys(plain),
        api_keys_file=arguments.api_keys_file,
        trusted_key_digest=digest_of(trusted) if trusted else b"",
        ssl_certfile=certificate,
        ssl_keyfile=private_key,
        ssl_ca_certs=arguments.grpc_ssl_ca_certs,
    )


def _from_environment(variable: str) -> str | None:
    text = os.environ.get(variable)
    if text and not is_writable(text):
        raise ValueError(f"${variable}: must be printable ASCII without spaces")
    return text or None
