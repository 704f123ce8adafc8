"""A facade listens before it has met its engine; `/readyz` tells when it will answer requests."""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urlsplit

_POLL_SECONDS = 0.03
_ANSWER_TIMEOUT_SECONDS = 5.0


async def until_ready(http: str) -> None:
    """Returns once the facade at this address answers that it is ready; never gives up."""
    while not await _is_ready(http):  # noqa: ASYNC110 - another process has no event to wait on
        await asyncio.sleep(_POLL_SECONDS)


async def _is_ready(http: str) -> bool:
    address = urlsplit(http)
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(
                address.hostname,
                address.port,
                ssl=_own_tls() if address.scheme == "https" else None,
            )
            try:
                request = f"GET /readyz HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
                writer.write(f"{request}\r\n".encode())
                status_line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    return b" 200 " in status_line


def _own_tls() -> ssl.SSLContext:
    """It is a child of ours that is asked, whoever signed its certificate and for whatever name."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
