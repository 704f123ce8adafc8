"""How a client connects and retries; secrets stay out of every repr."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """PEM texts; all None: TLS verified against the system's root certificates."""

    root_certificates: bytes | None = None
    certificate_chain: bytes | None = None  # ours, for mutual TLS; with private_key
    private_key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None  # the name to verify where it is not the target's

    def __post_init__(self) -> None:
        if (self.certificate_chain is None) != (self.private_key is None):
            raise ValueError("mutual TLS takes both certificate_chain and private_key")


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Keepalive agrees with the server, which accepts a ping every 10 s without calls."""

    token: str | Callable[[], str] | None = field(default=None, repr=False)  # or who provides it
    admin_key: str | Callable[[], str] | None = field(default=None, repr=False)  # for Control
    # None: plain text; or who provides it, asked at each call: new ones are for new calls
    tls: TlsOptions | Callable[[], TlsOptions] | None = None
    max_attempts: int = 3  # of one call, before it is accepted; 1: no retries
    initial_backoff_seconds: float = 0.1  # doubles with each attempt, jittered
    max_backoff_seconds: float = 2.0
    max_retry_wait_seconds: float = 10.0  # a longer retry hint goes to the caller at once
    call_timeout_seconds: float = 10.0  # of calls about the engine, unless they say otherwise
    silence_seconds: float = 5.0  # an engine that says nothing for so long is taken for dead
    connect_timeout_seconds: float = 5.0
    max_message_bytes: int = 64 * 1024 * 1024
    keepalive_seconds: float = 30.0
    keepalive_timeout_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError("max_attempts must be at least 1")
        for name, value in (
            ("call_timeout_seconds", self.call_timeout_seconds),
            ("silence_seconds", self.silence_seconds),
            ("connect_timeout_seconds", self.connect_timeout_seconds),
            ("max_message_bytes", self.max_message_bytes),
            ("keepalive_seconds", self.keepalive_seconds),
            ("keepalive_timeout_seconds", self.keepalive_timeout_seconds),
            ("initial_backoff_seconds", self.initial_backoff_seconds),
            ("max_backoff_seconds", self.max_backoff_seconds),
        ):
            if not value > 0:
                raise ValueError(f"{name} must be positive")
        if not self.max_retry_wait_seconds >= 0:
            raise ValueError("max_retry_wait_seconds must not be negative")
