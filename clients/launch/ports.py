"""Ports in use are told before anything is loaded, with the flag that chooses another."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from clients.launch.flags import UsageError


@dataclass(frozen=True, slots=True)
class WantedPort:
    flag: str
    host: str
    port: int  # 0: any free one


def check_ports(wanted: Iterable[WantedPort]) -> None:
    """Raises `UsageError` for a port that is taken, or wanted twice."""
    flag_by_port: dict[int, str] = {}
    for want in wanted:
        if want.port == 0:
            continue
        if other := flag_by_port.get(want.port):
            raise UsageError(f"{other} and {want.flag} both name port {want.port}.")
        flag_by_port[want.port] = want.flag
        _check_free(want)


def _check_free(want: WantedPort) -> None:
    try:
        address = socket.getaddrinfo(want.host, want.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], address[1]) as probe:
            # As servers do: a port whose last connections are still closing is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address[4])
    except (OSError, OverflowError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"Port {want.port} is in use; choose another with {want.flag} (0: any free one)."
            ) from error
        raise UsageError(
            f"{want.flag}: cannot listen on {want.host}:{want.port}: {error}"
        ) from error
