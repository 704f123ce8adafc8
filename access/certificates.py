"""A server's certificate and private key in PEM files, which are replaced while it runs."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path


class CertificateError(Exception):
    """The files can't be used; the message names the flag's file."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    certificate: Path  # the chain, the server's own first
    private_key: Path
    client_authorities: Path | None = None  # only clients with a certificate of one of these

    @property
    def paths(self) -> tuple[Path, ...]:
        others = (self.private_key, self.client_authorities)
        return (self.certificate, *(path for path in others if path is not None))

    def context(self) -> ssl.SSLContext:
        """For a server; what is not a pair is refused here. Raises CertificateError."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # A password is not asked for on the terminal: a service has none.
            context.load_cert_chain(self.certificate, self.private_key, password=_no_password)
            if self.client_authorities is not None:
                context.load_verify_locations(self.client_authorities)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise CertificateError(self._why_not(error)) from None
        return context

    def _why_not(self, error: OSError | ValueError) -> str:
        for path in self.paths:
            try:
                path.read_bytes()
            except OSError as unreadable:
                return f"{path}: can't be read: {unreadable.strerror}"
        why = error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)
        files = ", ".join(map(str, self.paths))
        return f"{files}: no certificate and private key that fit: {why}"


def _no_password() -> str:
    raise ValueError("the private key is encrypted")
