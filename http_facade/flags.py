"""The facade's command line: flags, their checks, and the configuration they make."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from traces.setup import trace_directory

API_KEY_VARIABLE = "FIRSTTOKEN_API_KEY"
AUTO_PARSER = "auto"
# Spelt out: `--help` loads no tokenizer. A test compares them with the formats there are.
TOOL_CALL_PARSERS = (AUTO_PARSER, "hermes", "llama3_json", "mistral", "pythonic", "generic")


@dataclass(frozen=True, slots=True)
class FacadeConfig:
    engine: str = "127.0.0.1:50051"  # host:port of the engine service
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    api_key: str | None = None  # None: no key is asked for
    served_model_names: tuple[str, ...] = ()  # aliases besides the engine's own name
    strict_params: bool = False  # unknown fields are 400
    max_body_bytes: int = 32 * 1024 * 1024
    max_stop_strings: int = 4
    tool_call_parser: str = AUTO_PARSER  # how the model writes tool calls
    sse_keepalive_seconds: float = 15.0
    trace_dir: str | None = None  # None: no local store
    otlp_traces_endpoint: str | None = None
    trace_sample_ratio: float = 1.0  # of traces started here
    shutdown_timeout_seconds: float = 30.0  # grace for running requests on SIGTERM
    log_level: str = "info"

    def __repr__(self) -> str:  # the key never reaches a log
        return f"FacadeConfig(engine={self.engine}, host={self.host}, port={self.port})"


def _number(
    kind: Callable[[str], float], low: float, high: float, what: str
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{what} expected, not {text!r}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{what} expected, not {text}")
        return value

    return parse


_PORT = _number(int, 0, 65535, "a port from 0 to 65535")
_COUNT = _number(int, 1, 2**31 - 1, "a whole number of at least 1")
_SECONDS = _number(float, 0, 86_400, "seconds from 0 to 86400")
_RATIO = _number(float, 0, 1, "a number from 0 to 1")


def _host_port(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not host or not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"HOST:PORT expected, not {text!r}")
    return text


def build_parser() -> argparse.ArgumentParser:
    defaults = FacadeConfig()
    parser = argparse.ArgumentParser(
        prog="firsttoken facade", description="OpenAI-compatible HTTP in front of an engine."
    )
    add = parser.add_argument
    add("--engine", type=_host_port, default=defaults.engine, help="the engine's gRPC HOST:PORT")
    add("--host", default=defaults.host, help="address to listen on")
    add("--port", type=_PORT, default=defaults.port, help="HTTP port; 0: any free one")
    add(
        "--api-key",
        default=None,
        help="key that every route but the two probes asks for "
        f"(or the environment variable {API_KEY_VARIABLE})",
    )
    add(
        "--served-model-name",
        action="append",
        default=None,
        help="a further name for the model; may be repeated",
    )
    add(
        "--strict-params",
        action="store_true",
        default=defaults.strict_params,
        help="answer unknown request fields with 400",
    )
    add(
        "--max-body-bytes",
        type=_COUNT,
        default=defaults.max_body_bytes,
        help="largest request body",
    )
    add(
        "--max-stop-strings",
        type=_COUNT,
        default=defaults.max_stop_strings,
        help="stop strings a request may give",
    )
    add(
        "--tool-call-parser",
        choices=TOOL_CALL_PARSERS,
        default=defaults.tool_call_parser,
        help="how the model writes tool calls; auto: as its chat template shows it",
    )
    add(
        "--sse-keepalive-seconds",
        type=_SECONDS,
        default=defaults.sse_keepalive_seconds,
        help="silence after which a stream gets a comment; 0: never",
    )
    add(
        "--trace-dir",
        metavar="DIR",
        help="the local trace store, or none ($FIRSTTOKEN_TRACE_DIR, else under the user's cache)",
    )
    add(
        "--otlp-traces-endpoint",
        default=defaults.otlp_traces_endpoint,
        help="OTLP collector for traces (gRPC)",
    )
    add(
        "--trace-sample-ratio",
        type=_RATIO,
        default=defaults.trace_sample_ratio,
        help="share of the traces started here that are recorded",
    )
    add(
        "--shutdown-timeout",
        type=_SECONDS,
        default=defaults.shutdown_timeout_seconds,
        help="seconds that running requests may take after SIGTERM",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=defaults.log_level,
        help="what goes to stderr",
    )
    add("--print-flags", action="store_true", help="print these flags as JSON and exit")
    return parser


def flags_json(parser: argparse.ArgumentParser) -> str:
    """What `firsttoken serve` needs to know to split a command line by owner."""
    described = [
        {
            "flags": list(action.option_strings),
            "dest": action.dest,
            "takes_value": action.nargs != 0,
            "default": action.default,
            "help": action.help,
        }
        for action in parser._actions
        if action.dest not in ("help", "print_flags")
    ]
    return json.dumps(described)


def config_from_args(args: argparse.Namespace) -> FacadeConfig:
    names: Sequence[str] = args.served_model_name or ()
    return FacadeConfig(
        engine=args.engine,
        host=args.host,
        port=args.port,
        api_key=args.api_key or os.environ.get(API_KEY_VARIABLE) or None,
        served_model_names=tuple(names),
        strict_params=args.strict_params,
        max_body_bytes=args.max_body_bytes,
        max_stop_strings=args.max_stop_strings,
        tool_call_parser=args.tool_call_parser,
        sse_keepalive_seconds=args.sse_keepalive_seconds,
        trace_dir=trace_directory(args.trace_dir),
        otlp_traces_endpoint=args.otlp_traces_endpoint or None,
        trace_sample_ratio=args.trace_sample_ratio,
        shutdown_timeout_seconds=args.shutdown_timeout,
        log_level=args.log_level,
    )
