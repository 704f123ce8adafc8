"""The facade's command line: flags, their checks, and the configuration they make."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from http_facade.edge import OPEN_EDGE, EdgeConfig, add_edge_flags, edge_config
from http_facade.engine_address import EngineAddress, parse_engine
from http_facade.routing import PREFIX, ROUTING_POLICIES
from traces.otlp import otlp_flag
from traces.setup import trace_directory

AUTO_PARSER = "auto"
# Spelt out: `--help` loads no tokenizer. A test compares them with the formats there are.
TOOL_CALL_PARSERS = (
    *(AUTO_PARSER, "hermes", "llama3_json", "mistral", "mistral_v11", "pythonic", "generic"),
)
REASONING_PARSERS = (AUTO_PARSER, "none", "qwen3", "deepseek_r1")
BOTH_REASONING_FIELDS = "both"
REASONING_FIELDS = (BOTH_REASONING_FIELDS, "reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class FacadeConfig:
    engines: tuple[EngineAddress, ...] = (EngineAddress("127.0.0.1", 50051),)
    routing_policy: str = PREFIX  # which of a model's engines takes a request
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    workers: int = 1  # processes that answer
    edge: EdgeConfig = OPEN_EDGE  # keys, TLS, CORS, access log
    served_model_names: tuple[str, ...] = ()  # aliases of the first engine's model
    strict_params: bool = False  # unknown fields are 400
    max_body_bytes: int = 32 * 1024 * 1024
    max_total_body_bytes: int = 256 * 1024 * 1024  # of requests under way, in each process
    max_connections: int = 4096  # in each process
    max_stop_strings: int = 4
    tool_call_parser: str = AUTO_PARSER  # how the model writes tool calls
    reasoning_parser: str = AUTO_PARSER  # how the model writes its thoughts
    reasoning_field: str = BOTH_REASONING_FIELDS  # of a message, for its thought
    sse_keepalive_seconds: float = 15.0
    trace_dir: str | None = None  # None: no local store
    otlp_traces_endpoint: str | None = None
    trace_sample_ratio: float = 1.0  # of traces started here
    trace_slow_ttft_ms: float = 1000.0  # whose others are kept if slower; 0: none
    enable_traces_page: bool = False  # /traces, of the local store
    shutdown_timeout_seconds: float = 30.0  # grace for running requests on SIGTERM
    log_level: str = "info"

    def __repr__(self) -> str:  # the key never reaches a log
        engines = ", ".join(map(str, self.engines))
        return f"FacadeConfig(engines=({engines}), host={self.host}, port={self.port})"


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
# What becomes of a body must fit one gRPC message of 64 MiB, and is never larger than the body.
_BODY_BYTES = _number(int, 1, 63 * 2**20, "a whole number from 1 to 66060288 (63 MiB)")
_TOTAL_BODY_BYTES = _number(int, 1, 2**50, "a whole number of at least 1")
_CONNECTIONS = _number(int, 1, 1_000_000, "a whole number from 1 to 1000000")
_COUNT = _number(int, 1, 2**31 - 1, "a whole number of at least 1")
_WORKERS = _number(int, 1, 64, "a whole number from 1 to 64")
_SECONDS = _number(float, 0, 86_400, "seconds from 0 to 86400")
_RATIO = _number(float, 0, 1, "a number from 0 to 1")


def _engine(text: str) -> EngineAddress:
    try:
        return parse_engine(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def build_parser() -> argparse.ArgumentParser:
    defaults = FacadeConfig()
    parser = argparse.ArgumentParser(
        prog="firsttoken facade", description="OpenAI-compatible HTTP in front of an engine."
    )
    add = parser.add_argument
    _add_engine_flags(add, defaults)
    add("--host", default=defaults.host, help="address to listen on")
    add("--port", type=_PORT, default=defaults.port, help="HTTP port; 0: any free one")
    add(
        "--workers",
        type=_WORKERS,
        default=defaults.workers,
        help="processes that answer requests on the port; /metrics is the sum of all, limits of "
        "keys are counted in each",
    )
    add_edge_flags(add)
    add(
        "--served-model-name",
        action="append",
        default=None,
        help="a further name for the (first engine's) model; may be repeated",
    )
    add(
        "--strict-params",
        action="store_true",
        default=defaults.strict_params,
        help="answer unknown request fields with 400",
    )
    add(
        "--max-body-bytes",
        type=_BODY_BYTES,
        default=defaults.max_body_bytes,
        help="largest request body",
    )
    add(
        "--max-total-body-bytes",
        type=_TOTAL_BODY_BYTES,
        default=defaults.max_total_body_bytes,
        help="of the bodies of all requests under way, in each worker; beyond it 503, but for "
        "bodies of up to 64 KiB",
    )
    add(
        "--max-connections",
        type=_CONNECTIONS,
        default=defaults.max_connections,
        help="open at a time, in each worker; beyond it those that wait for a request are closed, "
        "the longest waiting first, else new ones get 503",
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
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default=defaults.reasoning_parser,
        help="how the model writes thoughts, which are sent apart from the content of a chat's "
        "answer; auto: as its chat template shows it; none: all text is content",
    )
    add(
        "--reasoning-field",
        choices=REASONING_FIELDS,
        default=defaults.reasoning_field,
        help="the name under which messages carry thoughts",
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
        type=otlp_flag,
        metavar="ENDPOINT",
        default=defaults.otlp_traces_endpoint,
        help="OTLP collector: HOST:4317 (gRPC), or http://HOST:4318/v1/traces (HTTP);"
        " $OTEL_EXPORTER_OTLP_PROTOCOL tells which, too",
    )
    add(
        "--trace-sample-ratio",
        type=_RATIO,
        default=defaults.trace_sample_ratio,
        help="share of the traces started here that are recorded",
    )
    add(
        "--trace-slow-ttft-ms",
        type=_number(float, 0, 3_600_000, "milliseconds from 0 to 3600000"),
        default=defaults.trace_slow_ttft_ms,
        help="of the traces started here that are not in that share, those whose first token takes"
        " longer are kept all the same; 0: none",
    )
    add(
        "--enable-traces-page",
        action="store_true",
        default=defaults.enable_traces_page,
        help="show the local trace store at /traces: requests of all callers, to whoever has an"
        " admin key, or to all where there are no keys",
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


def _add_engine_flags(add: Callable[..., object], defaults: FacadeConfig) -> None:
    add(
        "--engine",
        dest="engines",
        type=_engine,
        action="append",
        default=None,
        metavar="[NAME=]HOST:PORT",
        help="where an engine serves gRPC; may be repeated; several of one NAME are replicas of "
        "one model, none: the engine's own name for it; dns:HOST:PORT: every address of HOST "
        f"(default: {defaults.engines[0]})",
    )
    add(
        "--routing-policy",
        choices=ROUTING_POLICIES,
        default=defaults.routing_policy,
        help="which of a model's engines takes a request; prefix: the one that has the prompt's "
        "beginning in its cache, unless it is overloaded",
    )


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
    """Raises ValueError for flags that can't go together."""
    names: Sequence[str] = args.served_model_name or ()
    engines = tuple(args.engines or FacadeConfig().engines)
    if twice := next((e for e in engines if engines.count(e) > 1), None):
        raise ValueError(f"--engine {twice} is given twice")
    if args.max_total_body_bytes < args.max_body_bytes:
        raise ValueError("--max-total-body-bytes must be --max-body-bytes or more")
    trace_dir = trace_directory(args.trace_dir)
    if args.enable_traces_page and trace_dir is None:
        raise ValueError("--enable-traces-page needs a trace store, but --trace-dir says none")
    return FacadeConfig(
        engines=engines,
        routing_policy=args.routing_policy,
        host=args.host,
        port=args.port,
        workers=args.workers,
        edge=edge_config(args),
        served_model_names=tuple(names),
        strict_params=args.strict_params,
        max_body_bytes=args.max_body_bytes,
        max_total_body_bytes=args.max_total_body_bytes,
        max_connections=args.max_connections,
        max_stop_strings=args.max_stop_strings,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        reasoning_field=args.reasoning_field,
        sse_keepalive_seconds=args.sse_keepalive_seconds,
        trace_dir=trace_dir,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        trace_sample_ratio=args.trace_sample_ratio,
        trace_slow_ttft_ms=args.trace_slow_ttft_ms,
        enable_traces_page=args.enable_traces_page,
        shutdown_timeout_seconds=args.shutdown_timeout,
        log_level=args.log_level,
    )
