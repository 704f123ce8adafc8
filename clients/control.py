"""`firsttoken control`: what an operator does to a running engine.

firsttoken control flush --engine 127.0.0.1:50051      forgets every cached prefix
firsttoken control drain --engine 127.0.0.1:50051      nothing new; ends when all is done
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from clients.errors import EngineClientError
from clients.options import ClientOptions, TlsOptions
from clients.sync_client import SyncEngineClient

ADMIN_KEY_VARIABLE = "FIRSTTOKEN_ADMIN_KEY"


def control(arguments: Sequence[str]) -> int:
    """The exit code: 1 when the engine refused or is not there."""
    given = _parser().parse_args(arguments)
    admin_key = given.admin_key or os.environ.get(ADMIN_KEY_VARIABLE)
    try:
        options = ClientOptions(admin_key=admin_key, tls=_tls(given))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with SyncEngineClient(given.engine, options=options) as client:
        try:
            if given.action == "flush":
                print(f"flushed; blocks that held a cached prefix: {client.flush_prefix_cache()}")
            else:
                print(f"draining; requests still live: {client.drain()}")
        except (EngineClientError, ValueError) as error:  # a key that can't travel is the latter
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


def _tls(given: argparse.Namespace) -> TlsOptions | None:
    """Raises OSError for files that can't be read, ValueError for half a pair."""
    if given.ssl_ca is None:
        return None
    certificate, private_key = given.ssl_certfile, given.ssl_keyfile
    return TlsOptions(
        root_certificates=None if given.ssl_ca == "system" else Path(given.ssl_ca).read_bytes(),
        certificate_chain=certificate.read_bytes() if certificate else None,
        private_key=private_key.read_bytes() if private_key else None,
        server_name=given.ssl_server_name,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="firsttoken control", description="Controls a running engine."
    )
    parser.add_argument(
        "action",
        choices=("flush", "drain"),
        help="flush: forget every cached prefix; drain: take nothing new, end when all is done",
    )
    parser.add_argument(
        "--engine", metavar="HOST:PORT", default="127.0.0.1:50051", help="default: %(default)s"
    )
    parser.add_argument(
        "--admin-key",
        help=f"the engine's credential (or the environment variable {ADMIN_KEY_VARIABLE})",
    )
    parser.add_argument(
        "--ssl-ca",
        metavar="FILE",
        help="TLS; who signed the engine's certificate, or `system`; none: plain text",
    )
    parser.add_argument("--ssl-certfile", type=Path, help="our certificate, for mutual TLS")
    parser.add_argument("--ssl-keyfile", type=Path, help="its private key")
    parser.add_argument("--ssl-server-name", help="in the certificate, if not the address's")
    return parser
