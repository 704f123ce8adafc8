"""With which key and over which TLS the facade calls its engines."""

from __future__ import annotations

from pathlib import Path

from access.certificates import CertificateError
from clients.options import ClientOptions, TlsOptions
from http_facade.edge import SYSTEM_AUTHORITIES, EdgeConfig


def engine_client_options(edge: EdgeConfig) -> ClientOptions:
    """Reads the files, which are not read again. Raises CertificateError."""
    return ClientOptions(
        token=edge.engine_api_key,
        tls=_tls(edge),
        # A retry hint goes on to the HTTP client: it is the one to wait, not a held connection.
        max_retry_wait_seconds=0.0,
    )


def _tls(edge: EdgeConfig) -> TlsOptions | None:
    if edge.engine_ssl_ca is None:
        return None
    is_system = edge.engine_ssl_ca == SYSTEM_AUTHORITIES
    return TlsOptions(
        root_certificates=None if is_system else _read(Path(edge.engine_ssl_ca)),
        certificate_chain=_read(edge.engine_ssl_certfile),
        private_key=_read(edge.engine_ssl_keyfile),
        server_name=edge.engine_ssl_server_name,
    )


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(f"{path}: can't be read: {error.strerror}") from None
