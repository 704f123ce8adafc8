"""Where engines are and what their model is called, as `--engine` says it.

127.0.0.1:50051            one engine; its model has the name that the engine gives it
chat=10.0.0.5:50051        one engine; its model is called chat
chat=dns:engines:50051     every address of the name `engines` is an engine
"""

from __future__ import annotations

from dataclasses import dataclass

_DNS = "dns:"


@dataclass(frozen=True, slots=True)
class EngineAddress:
    host: str  # IPv6 in brackets, as in a URL
    port: int
    model_name: str = ""  # empty: the engine's own name for its model
    is_dns: bool = False  # every address that the host has is an engine

    @property
    def target(self) -> str:
        return f"{self.host}:{self.port}"

    def __str__(self) -> str:
        name = f"{self.model_name}=" if self.model_name else ""
        return f"{name}{_DNS if self.is_dns else ''}{self.target}"


def parse_engine(text: str) -> EngineAddress:
    """Raises ValueError with what was expected."""
    name, equals, place = text.rpartition("=")
    is_dns = place.startswith(_DNS)
    host, _, port = place.removeprefix(_DNS).rpartition(":")
    is_bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if not host or is_bare_ipv6 or not is_port or (equals and not name):
        raise ValueError(f"[NAME=]HOST:PORT or [NAME=]dns:HOST:PORT expected, not {text!r}")
    return EngineAddress(host, int(port), name, is_dns)
