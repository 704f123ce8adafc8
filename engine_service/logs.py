"""Logs go to stderr; stdout carries the lines that say where the service listens."""

from __future__ import annotations

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s",
    )
