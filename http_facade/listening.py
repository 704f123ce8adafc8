"""Taking an address to listen on, and what to say where it can't be had."""

from __future__ import annotations

import errno
import socket
from contextlib import closing


class CannotListen(Exception):
    """The address can't be listened on; the message names the flag to change."""


def bind(host: str, port: int, *, shares_port: bool = False) -> socket.socket:
    """A bound socket that does not listen yet. Raises CannotListen.

    `shares_port`: others of this user may bind it, too, and those who listen share what comes.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if shares_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise CannotListen(_why_not(host, port, error)) from None
    return bound


def reserve(host: str, port: int) -> socket.socket:
    """A shared port that was nobody's before, held until the socket is closed: without listening,
    so nothing arrives at it. Raises CannotListen."""
    with closing(bind(host, port)) as alone:
        port = alone.getsockname()[1]
    return bind(host, port, shares_port=True)


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} may not be listened on by this user: choose another with --port"
    return f"can't listen on {host} port {port}: {error.strerror}; see --host and --port"
