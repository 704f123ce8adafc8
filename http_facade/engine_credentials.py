"""With which key and over which TLS the facade calls its engines.

The files are read anew when they change: calls that run keep the connection they have, new calls
get one with the new certificates.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from access.certificates import CertificateError
from access.watch import FileWatch, follow
from clients.options import ClientOptions, TlsOptions
from http_facade.edge import SYSTEM_AUTHORITIES, EdgeConfig

logger = logging.getLogger(__name__)


class EngineTls:
    def __init__(self, edge: EdgeConfig) -> None:
        """Raises CertificateError."""
        is_system = edge.engine_ssl_ca in (None, SYSTEM_AUTHORITIES)
        self._authorities = None if is_system else Path(str(edge.engine_ssl_ca))
        self._certificate = edge.engine_ssl_certfile
        self._private_key = edge.engine_ssl_keyfile
        self._server_name = edge.engine_ssl_server_name
        paths = (self._authorities, self._certificate, self._private_key)
        # before they are read: no change is missed
        self._watch = FileWatch(path for path in paths if path is not None)
        self._current = self._read()

    def current(self) -> TlsOptions:
        return self._current

    def reload(self) -> None:
        """Between two files of a pair that are written one after the other, the old ones stay."""
        try:
            self._current = self._read()
        except CertificateError as error:
            logger.error("the certificates for engines stay as they were: %s", error)
            return
        logger.info("new certificates for engines")

    async def follow_files(self, app: web.Application) -> AsyncIterator[None]:
        """A cleanup context of the application."""
        following = asyncio.create_task(follow(self._watch, self.reload))
        yield
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following

    def _read(self) -> TlsOptions:
        tls = TlsOptions(
            root_certificates=_read(self._authorities),
            certificate_chain=_read(self._certificate),
            private_key=_read(self._private_key),
            server_name=self._server_name,
        )
        self._check()
        return tls

    def _check(self) -> None:
        """gRPC would take anything, and only fail to connect. Raises CertificateError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self._authorities is not None:
                context.load_verify_locations(self._authorities)
            if self._certificate is not None:
                context.load_cert_chain(self._certificate, self._private_key, _no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            files = ", ".join(map(str, filter(None, (self._authorities, self._certificate))))
            raise CertificateError(f"{files}: no certificates that can be used: {error}") from None


def _no_password() -> str:
    raise ValueError("the private key is encrypted")


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(f"{path}: can't be read: {error.strerror}") from None


def engine_client_options(edge: EdgeConfig, tls: EngineTls | None) -> ClientOptions:
    return ClientOptions(
        token=edge.engine_api_key,
        tls=None if tls is None else tls.current,
        # A retry hint goes on to the HTTP client: it is the one to wait, not a held connection.
        max_retry_wait_seconds=0.0,
    )
