"""What may reach the facade and what it says of it: keys, TLS, names, CORS, access log; with which
credentials it calls the engine. The flags, and the configuration they make."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from access.keys import ApiKey, admin_key, digest_of, is_writable, plain_keys

API_KEY_VARIABLE = "FIRSTTOKEN_API_KEY"
ADMIN_KEY_VARIABLE = "FIRSTTOKEN_ADMIN_KEY"
ENGINE_API_KEY_VARIABLE = "FIRSTTOKEN_ENGINE_API_KEY"
ACCESS_LOGS = ("text", "json", "off")
SYSTEM_AUTHORITIES = "system"
_HOST = re.compile(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*\.?|[0-9A-Fa-f.]*:[0-9A-Fa-f:.]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """Raises ValueError for what can't go together, naming the flags."""

    api_keys: tuple[ApiKey, ...] = ()  # neither these nor a file: no key is asked for
    api_keys_file: Path | None = None
    admin_key: ApiKey | None = None
    ssl_certfile: Path | None = None  # None: plain HTTP
    ssl_keyfile: Path | None = None
    allowed_hosts: tuple[str, ...] | None = None  # names of ours; None: see `hosts.py`; ("*",): any
    allowed_origins: tuple[str, ...] = ()  # of pages elsewhere; ("*",): any
    access_log: str = "text"
    log_prompts: bool = False
    engine_api_key: str | None = field(default=None, repr=False)
    engine_ssl_ca: str | None = None  # a file or SYSTEM_AUTHORITIES; None: plain text
    engine_ssl_certfile: Path | None = None  # ours, for mutual TLS
    engine_ssl_keyfile: Path | None = None
    engine_ssl_server_name: str | None = None  # to verify, where it isn't the address's

    def __post_init__(self) -> None:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("TLS takes both --ssl-certfile and --ssl-keyfile")
        if (self.engine_ssl_certfile is None) != (self.engine_ssl_keyfile is None):
            raise ValueError("mutual TLS takes both --engine-ssl-certfile and --engine-ssl-keyfile")
        if self.engine_ssl_ca is None and (self.engine_ssl_certfile or self.engine_ssl_server_name):
            raise ValueError("TLS to the engine takes --engine-ssl-ca: a file, or `system`")
        if self.log_prompts and self.access_log == "off":
            raise ValueError("--log-prompts has no effect with --access-log off")


OPEN_EDGE = EdgeConfig()


def _key(text: str) -> str:
    if not is_writable(text):
        raise argparse.ArgumentTypeError("a key is printable ASCII without spaces")
    return text


def _listed(text: str, what: str) -> tuple[str, ...]:
    """A JSON list, or names with commas between."""
    try:
        names: object = json.loads(text) if text.lstrip().startswith("[") else text.split(",")
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise argparse.ArgumentTypeError(f"{what} with commas between, or a JSON list, expected")
    return tuple(name.strip() for name in names if name.strip())


def _hosts(text: str) -> tuple[str, ...]:
    hosts = _listed(text, "names")
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise argparse.ArgumentTypeError(
                "a host is written as llm.example, *.example or 10.0.0.7, without a port, or as *"
                f" for any; not {host!r}"
            )
    return hosts


def _origins(text: str) -> tuple[str, ...]:
    origins = tuple(origin.rstrip("/") for origin in _listed(text, "origins"))
    for origin in origins:
        if origin != "*" and "://" not in origin:
            raise argparse.ArgumentTypeError(
                f"an origin is written as https://app.example, or * for any; not {origin!r}"
            )
    return origins


def add_edge_flags(add: Callable[..., Any]) -> None:
    """`add`: a parser's add_argument."""
    _add_key_flags(add)
    add("--ssl-certfile", type=Path, help="PEM file: the certificate chain; read anew on a change")
    add("--ssl-keyfile", type=Path, help="PEM file: the certificate's private key")
    add(
        "--allowed-hosts",
        type=_hosts,
        default=None,
        metavar="NAME,...",
        help="further names that requests may ask for (Host): llm.example,*.lan,..., a JSON list, "
        "or * for any; none: on loopback without keys localhost and loopback addresses only, "
        "else any",
    )
    add(
        "--allowed-origins",
        type=_origins,
        default=None,
        help="of web pages that may call from a browser (CORS): https://a.example,..., a JSON "
        "list, or *; none: no other page may",
    )
    add(
        "--access-log",
        choices=ACCESS_LOGS,
        default=OPEN_EDGE.access_log,
        help="one line per request on stderr",
    )
    add(
        "--log-prompts",
        action="store_true",
        help="prompts go to the access log, too; they never do otherwise",
    )
    add(
        "--engine-api-key",
        type=_key,
        help="the facade's own key for the engine, one that the engine trusts "
        f"(or the environment variable {ENGINE_API_KEY_VARIABLE})",
    )
    add(
        "--engine-ssl-ca",
        metavar="FILE",
        help="TLS to the engine, whose certificate one of these authorities signed; "
        f"`{SYSTEM_AUTHORITIES}`: those of the system; none: plain text",
    )
    add("--engine-ssl-certfile", type=Path, help="the facade's certificate, for mutual TLS")
    add("--engine-ssl-keyfile", type=Path, help="its private key")
    add("--engine-ssl-server-name", help="in the engine's certificate, if not the address's")


def _add_key_flags(add: Callable[..., Any]) -> None:
    add(
        "--api-key",
        type=_key,
        action="append",
        default=None,
        help="key that every route but the two probes asks for; may be repeated "
        f"(or the environment variable {API_KEY_VARIABLE})",
    )
    add(
        "--api-keys-file",
        type=Path,
        help="YAML or JSON: keys with tenant, priority and limits; read anew when it changes",
    )
    add(
        "--admin-key",
        type=_key,
        help=f"key for what is for operators (or the environment variable {ADMIN_KEY_VARIABLE})",
    )


def edge_config(args: argparse.Namespace) -> EdgeConfig:
    """Raises ValueError."""
    keys = args.api_key or [key for key in [_from_environment(API_KEY_VARIABLE)] if key]
    operators = args.admin_key or _from_environment(ADMIN_KEY_VARIABLE)
    return EdgeConfig(
        api_keys=plain_keys(keys),
        api_keys_file=args.api_keys_file,
        admin_key=admin_key(digest_of(operators)) if operators else None,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        allowed_hosts=args.allowed_hosts,
        allowed_origins=args.allowed_origins or (),
        access_log=args.access_log,
        log_prompts=args.log_prompts,
        engine_api_key=args.engine_api_key or _from_environment(ENGINE_API_KEY_VARIABLE),
        engine_ssl_ca=args.engine_ssl_ca,
        engine_ssl_certfile=args.engine_ssl_certfile,
        engine_ssl_keyfile=args.engine_ssl_keyfile,
        engine_ssl_server_name=args.engine_ssl_server_name,
    )


def _from_environment(variable: str) -> str | None:
    """Raises ValueError for a key that can't travel."""
    key = os.environ.get(variable)
    if key and not is_writable(key):
        raise ValueError(f"${variable}: a key is printable ASCII without spaces")
    return key or None
