"""Certificates for tests: an authority, and what it signs, as the files that servers read."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import trustme


@dataclass
class Authority:
    directory: Path
    ca: trustme.CA = field(default_factory=trustme.CA)

    @property
    def root(self) -> Path:
        path = self.directory / "root.pem"
        self.ca.cert_pem.write_to_path(str(path))
        return path

    @property
    def root_pem(self) -> bytes:
        return self.ca.cert_pem.bytes()

    def issue(self, name: str, *hosts: str) -> Path:
        """Writes `name`.pem and `name`.key, in place of those there are; returns the first."""
        certificate = self.ca.issue_cert(*hosts, common_name=name)
        chain = b"".join(pem.bytes() for pem in certificate.cert_chain_pems)
        (self.directory / f"{name}.key").write_bytes(certificate.private_key_pem.bytes())
        (self.directory / f"{name}.pem").write_bytes(chain)
        return self.directory / f"{name}.pem"

    def client_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        return context


def key_of(certificate: Path) -> Path:
    return certificate.with_suffix(".key")
