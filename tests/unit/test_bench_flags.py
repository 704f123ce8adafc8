"""The flags of `firsttoken bench`: what they ask for, and what is refused before any request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clients.bench import flags, plans
from clients.bench.command import bench
from clients.bench.target import Api, TargetOptions
from clients.bench.workloads import Prompt, PromptKind, Workload

URL = "http://127.0.0.1:1"


def options(*arguments: str) -> TargetOptions:
    parser = flags.bench_parser()
    return plans.server_options(parser, parser.parse_args(arguments))


def test_flags_become_a_plan() -> None:
    parser = flags.bench_parser()
    line = f"--url {URL} --workload w3 --concurrency 4 --requests 9 --seed s --warmup 0"
    given = parser.parse_args([*line.split(), "--prompt-tokens=5", "--max-tokens=6"])
    (plan,) = plans.bench_plans(parser, given)
    assert (plan.workload, plan.concurrency, plan.num_requests) == (Workload.W3, 4, 9)
    assert (plan.seed, plan.num_warmup) == ("s", 0)
    assert (plan.sizes.prompt_tokens, plan.sizes.max_tokens) == (5, 6)


def test_without_a_seed_each_run_has_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = set()
    for now_ns in (5_000_000, 6_000_000):
        monkeypatch.setattr("time.time_ns", lambda now_ns=now_ns: now_ns)
        parser = flags.bench_parser()
        (plan,) = plans.bench_plans(parser, parser.parse_args(["--url", URL]))
        seeds.add(plan.seed)
    assert len(seeds) == 2


def test_w5_makes_two_plans_with_the_sizes_of_both() -> None:
    parser = flags.bench_parser()
    line = f"--url {URL} --workload w5 --duration 4 --num-long 3 --long-prompt-tokens 99"
    base, mixed = plans.bench_plans(parser, parser.parse_args(line.split()))
    assert (base.window.duration_seconds, base.window.num_long) == (2, 0)
    assert (mixed.window.duration_seconds, mixed.window.num_long) == (4, 3)
    assert mixed.sizes.long_prompt_tokens == 99


def test_an_address_over_grpc_has_its_scheme() -> None:
    parser = flags.bench_parser()
    assert parser.parse_args(["--grpc", "[::1]:50051"]).address == "grpc://[::1]:50051"


def test_the_key_comes_from_the_flag_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(flags.API_KEY_VARIABLE, raising=False)
    assert options("--url", URL).api_key is None
    monkeypatch.setenv(flags.API_KEY_VARIABLE, "from-environment")
    assert options("--url", URL).api_key == "from-environment"
    assert options("--url", URL, "--api-key", "given").api_key == "given"
    assert "given" not in repr(options("--url", URL, "--api-key", "given"))


def test_each_side_of_a_comparison_gets_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flags.API_KEY_VARIABLE, "ours")
    parser = flags.compare_parser()
    given = parser.parse_args([URL, "grpc://h:1", "--api-key-b", "theirs", "--model-a", "m"])
    a, b = plans.side_options(parser, given)
    assert (a.api_key, b.api_key) == (None, "theirs")
    assert (a.model, b.model) == ("m", None)
    plan = plans.compare_plan(given)
    assert [str(load) for load in plan.loads][:2] == ["w1@1/3", "w1@8/16"]
    assert plan.num_repeats == 3


def test_only_prompts_with_a_schema_are_chats_unless_told() -> None:
    with_schema, plain = (Prompt(kind, "", 1) for kind in (PromptKind.W4, PromptKind.W1))
    given = options("--url", URL)
    assert [given.api_for(p) for p in (with_schema, plain)] == [Api.CHAT, Api.COMPLETIONS]
    told = options("--url", URL, "--api", "chat")
    assert told.api_for(plain) is Api.CHAT


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "one of the arguments --url --grpc is required"),
        (f"--url {URL} --grpc h:1", "not allowed with argument"),
        ("--url localhost:8000", "no http:// or https:// address"),
        ("--url http://h:port", "no http:// or https:// address"),
        ("--grpc localhost", "no HOST:PORT"),
        ("--grpc localhost:0", "no HOST:PORT"),
        (f"--url {URL} --workload w6", "invalid choice: 'w6'"),
        (f"--url {URL} --concurrency 0", "no whole number from 1 on"),
        (f"--url {URL} --concurrency two", "no whole number from 1 on"),
        (f"--url {URL} --warmup -1", "no whole number from 0 on"),
        (f"--url {URL} --timeout nan", "no positive number"),
        (f"--url {URL} --timeout inf", "no positive number"),
        (f"--url {URL} --json /nowhere/at/all.json", "cannot be written"),
        (f"--url {URL} --json /", "cannot be written"),
        (f"--url {URL} --extra-fields [1]", "no JSON object"),
        (f"--url {URL} --extra-fields {{", "no JSON"),
        (f"--url {URL} --workload w5 --requests 3", "--requests: w5 lasts"),
        (f"--url {URL} --send-text", "--send-text: is for gRPC"),
        ('--grpc h:1 --extra-fields {"a":1}', "--extra-fields: gRPC has no body"),
        (f"--url {URL} --api-key schlüssel", "printable ASCII"),
        (f"--url {URL} --con 3", "unrecognized arguments: --con 3"),
        (f"compare {URL}", "the following arguments are required: B"),
        (f"compare {URL} x", "no http:// or https:// address"),
        (f"compare {URL} {URL} --workloads w9@1", "'w9@1' is no load"),
        (f"sweep --url {URL}", "required: --itl-p99-ms"),
        (f"sweep --url {URL} --itl-p99-ms 0", "no positive number"),
        (f"sweep --url {URL} --itl-p99-ms 9 --workload w5", "invalid choice: 'w5'"),
        (f"sweep --url {URL} --itl-p99-ms 9 --start 9 --end 8", "--start: must not be more"),
    ],
)
def test_wrong_arguments_are_said_and_end_with_2(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(line.split())
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert says in message
    assert "schlüssel" not in message


@pytest.mark.parametrize("command", ["", "compare ", "sweep "])
def test_help_tells_the_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(f"{command}--help".split())
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: firsttoken bench {command}".rstrip())
    assert "130  interrupted" in text


def test_an_installation_without_an_http_client_is_told_what_it_lacks() -> None:
    code = (
        "import sys; sys.modules['aiohttp'] = None\n"
        "from clients.cli import main; sys.exit(main(['bench', '--help']))"
    )
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == "firsttoken bench needs firsttoken[facade]: no aiohttp\n"


def test_the_json_goes_where_a_folder_is(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    given = flags.bench_parser().parse_args(["--url", URL, "--json", str(path)])
    assert given.json == path
    assert not path.exists()
