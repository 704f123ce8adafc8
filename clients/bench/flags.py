"""The flags of `firsttoken bench` and of its two further commands; `plans` reads them."""

from __future__ import annotations

import argparse

from clients.bench import flag_types
from clients.bench.compare import DEFAULT_LOADS
from clients.bench.target import Api
from clients.bench.workloads import Sizes, Window

API_KEY_VARIABLE = "FIRSTTOKEN_API_KEY"

_MORE = """\
workloads:
  w1  distinct prompts of about 60 tokens, 64 tokens out
  w2  one shared prefix of about 1,500 tokens and 40 distinct ones, 32 out
  w3  distinct prompts of about 1,024 tokens, 32 out
  w4  an object by a JSON schema, at most 64 out
  w5  w1's streams for some seconds: alone, then while long prompts come in

further commands:
  firsttoken bench compare A B   two servers in turns, and their ratios
  firsttoken bench sweep         how many streams a server carries within a bound

"""
_EXIT_CODES = """\
exit codes:
  0    every request was answered
  1    some were not
  2    wrong arguments
  3    a server is out of reach, or does not say what is needed to measure it
  130  interrupted; what was measured by then is printed"""


def bench_parser() -> argparse.ArgumentParser:
    parser = _parser("bench", "Puts a load on a server and says how it did.", _MORE)
    _add_server(parser)
    _add_workload(parser, "w1", "w2", "w3", "w4", "w5")
    parser.add_argument(
        "--concurrency",
        metavar="N",
        type=flag_types.positive,
        default=1,
        help="streams at a time (default: 1)",
    )
    _add_num_requests(parser)
    _add_load(parser)
    _add_window(parser)
    _add_protocol(parser)
    _add_output(parser)
    return parser


def compare_parser() -> argparse.ArgumentParser:
    parser = _parser("bench compare", "Measures two servers in turns: A, B, A, B, …")
    kinds = "http(s)://… or grpc://HOST:PORT"
    parser.add_argument("a", metavar="A", type=flag_types.any_address, help=kinds)
    parser.add_argument(
        "b", metavar="B", type=flag_types.any_address, help="the same; ratios are A / B"
    )
    for side in ("A", "B"):
        name = side.lower()
        parser.add_argument(f"--model-{name}", help=f"of {side} (default: the first that it lists)")
        parser.add_argument(f"--api-key-{name}", type=flag_types.api_key, help=f"of {side}")
    parser.add_argument(
        "--workloads",
        metavar="LIST",
        type=flag_types.loads,
        default=DEFAULT_LOADS,
        help="WORKLOAD@CONCURRENCY or WORKLOAD@CONCURRENCY/REQUESTS, separated by commas"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats", metavar="N", type=flag_types.positive, default=3, help="default: 3"
    )
    _add_load(parser)
    _add_window(parser)
    _add_protocol(parser)
    _add_output(parser)
    return parser


def sweep_parser() -> argparse.ArgumentParser:
    parser = _parser(
        "bench sweep", "Raises concurrency until p99 inter-token latency crosses a bound."
    )
    _add_server(parser)
    _add_workload(parser, "w1", "w2", "w3", "w4")
    parser.add_argument(
        "--itl-p99-ms", metavar="MS", type=flag_types.positive_number, required=True, help="bound"
    )
    for name, default in (("--start", 1), ("--end", 256)):
        parser.add_argument(
            name,
            metavar="N",
            type=flag_types.positive,
            default=default,
            help=f"concurrency to {name.strip('-')} at (default: %(default)s)",
        )
    _add_num_requests(parser)
    _add_load(parser)
    _add_protocol(parser)
    _add_output(parser)
    return parser


def _parser(command: str, description: str, more: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"firsttoken {command}",
        description=description,
        epilog=more + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--url", dest="address", type=flag_types.http_url, help="an OpenAI-compatible server"
    )
    where.add_argument(
        "--grpc",
        dest="address",
        metavar="HOST:PORT",
        type=flag_types.grpc_address,
        help="an engine, over gRPC",
    )
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument(
        "--api-key",
        type=flag_types.api_key,
        help=f"or the environment variable {API_KEY_VARIABLE}",
    )


def _add_workload(parser: argparse.ArgumentParser, *choices: str) -> None:
    parser.add_argument("--workload", choices=choices, default="w1", help="default: w1")


def _add_num_requests(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests",
        metavar="N",
        type=flag_types.positive,
        help="how many in a run (default: what suits workload and concurrency)",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument("--seed", help="equal seeds, equal prompts (default: a new one)")
    group.add_argument(
        "--warmup",
        metavar="N",
        type=flag_types.not_negative,
        help="requests before the clock starts (default: 1 for w1, w2 and w4, else 0)",
    )
    for name, default, what in (
        ("--prompt-tokens", None, "of w1 and w3"),
        ("--prefix-tokens", Sizes().prefix_tokens, "that w2's prompts share"),
        ("--max-tokens", None, "of an answer"),
    ):
        group.add_argument(name, metavar="N", type=flag_types.positive, default=default, help=what)


def _add_window(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("w5")
    window, sizes = Window(), Sizes()
    for name, seconds, what in (
        ("--duration", window.duration_seconds, "of the streams; half of it where they are alone"),
        ("--grace", window.grace_seconds, "after that, for what is still open"),
        ("--long-interval", window.long_interval_seconds, "between long prompts"),
    ):
        group.add_argument(
            name,
            metavar="SECONDS",
            type=flag_types.positive_number,
            default=seconds,
            help=f"{what} (default: %(default)g)",
        )
    for name, number, what in (
        ("--num-long", window.num_long, "long prompts"),
        ("--long-prompt-tokens", sizes.long_prompt_tokens, "of each"),
        ("--long-max-tokens", sizes.long_max_tokens, "of its answer"),
    ):
        group.add_argument(
            name,
            metavar="N",
            type=flag_types.positive,
            default=number,
            help=f"{what} (default: %(default)s)",
        )


def _add_protocol(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--api", choices=[api.value for api in Api], help="default: chat for w4, else completions"
    )
    group.add_argument(
        "--no-ignore-eos",
        action="store_true",
        help="do not ask for answers of full length: for servers that refuse ignore_eos",
    )
    group.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=flag_types.positive_number,
        default=600.0,
        help="of one request (default: %(default)g)",
    )
    group.add_argument(
        "--extra-fields",
        metavar="JSON",
        type=flag_types.json_object,
        default={},
        help="an object whose fields go into every HTTP body",
    )
    group.add_argument(
        "--send-text",
        action="store_true",
        help="gRPC: send prompts as text, not as token ids",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", metavar="PATH", type=flag_types.writable_path, help="write all figures there"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
