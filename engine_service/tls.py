"""TLS of the gRPC edge. The files are looked at with each handshake, and read anew once they
changed: connections that are open keep the certificate they began with."""

from __future__ import annotations

import logging

import grpc

from access.certificates import CertificateError, CertificateFiles
from access.watch import FileWatch
from engine_service.config import EdgeConfig

logger = logging.getLogger(__name__)


def server_credentials(edge: EdgeConfig) -> grpc.ServerCredentials | None:
    """None: plain text. Raises CertificateError."""
    if edge.ssl_certfile is None or edge.ssl_keyfile is None:
        return None
    files = CertificateFiles(edge.ssl_certfile, edge.ssl_keyfile, edge.ssl_ca_certs)
    source = _Certificates(files)
    return grpc.dynamic_ssl_server_credentials(
        source.read(),
        source.read_if_changed,  # type: ignore[arg-type]  # its stubs know no "unchanged"
        edge.ssl_ca_certs is not None,
    )


class _Certificates:
    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._watch = FileWatch(files.paths)  # before they are read: no change is missed

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Raises CertificateError."""
        files = self._files
        files.context()  # a pair that doesn't fit would only be seen in failing handshakes
        authorities = files.client_authorities
        try:
            pair = (files.private_key.read_bytes(), files.certificate.read_bytes())
            roots = None if authorities is None else authorities.read_bytes()
        except OSError as error:
            raise CertificateError(f"{error.filename}: can't be read: {error.strerror}") from None
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

    def read_if_changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC, on its threads; None: what is there still holds."""
        if not self._watch.has_changed():
            return None
        try:
            configuration = self.read()
        except CertificateError as error:
            logger.error("the certificate stays as it was: %s", error)
            return None
        logger.info("a new certificate: %s", self._files.certificate)
        return configuration
