"""TLS of the facade's own socket. Certificates are replaced while it runs: connections that are
open keep the one they began with, new ones get the new one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from access.certificates import CertificateError, CertificateFiles
from access.watch import FileWatch, follow
from http_facade.edge import EdgeConfig

HANDSHAKE_SECONDS = 10.0

logger = logging.getLogger(__name__)


class _ServerTls:
    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self.watch = FileWatch(files.paths)  # before they are read: no change is missed
        self._current = files.context()
        # What listens keeps one context for good; each handshake is handed on to the current one.
        self.context = files.context()
        self.context.sni_callback = self._choose

    def reload(self) -> None:
        """Between two files of a pair that are written one after the other, the old one stays."""
        try:
            self._current = self._files.context()
        except CertificateError as error:
            logger.error("the certificate stays as it was: %s", error)
            return
        logger.info("a new certificate: %s", self._files.certificate)

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._current


@asynccontextmanager
async def server_tls(edge: EdgeConfig) -> AsyncIterator[ssl.SSLContext | None]:
    """None: plain HTTP. Raises CertificateError."""
    if edge.ssl_certfile is None or edge.ssl_keyfile is None:
        yield None
        return
    tls = _ServerTls(CertificateFiles(edge.ssl_certfile, edge.ssl_keyfile))
    following = asyncio.create_task(follow(tls.watch, tls.reload))
    try:
        yield tls.context
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
