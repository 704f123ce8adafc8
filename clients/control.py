"""`firsttoken control`: what an operator does to a running engine.

firsttoken control flush --engine 127.0.0.1:50051      forgets every cached prefix
firsttoken control drain --engine 127.0.0.1:50051      nothing new; ends when all is done
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from clients.errors import EngineClientError
from clients.options import ClientOptions
from clients.sync_client import SyncEngineClient

ADMIN_KEY_VARIABLE = "FIRSTTOKEN_ADMIN_KEY"


def control(arguments: Sequence[str]) -> int:
    """The exit code: 1 when the engine refused or is not there."""
    given = _parser().parse_args(arguments)
    admin_key = given.admin_key or os.environ.get(ADMIN_KEY_VARIABLE)
    options = ClientOptions(admin_key=admin_key)
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
    return parser
