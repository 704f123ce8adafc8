"""Whether other machines reach an address, and what to say where it asks for no key."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """A name that isn't `localhost` is taken for reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def open_door_warning(what: str, host: str) -> str:
    return (
        f"ANYONE WHO REACHES {host} MAY USE THIS {what}: it listens beyond this machine and asks"
        " for no key. Set --api-key or --api-keys-file, or listen on 127.0.0.1"
    )
