"""The facade's command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from clients.text.tool_parsers import TOOL_FORMATS
from http_facade.flags import (
    AUTO_PARSER,
    TOOL_CALL_PARSERS,
    FacadeConfig,
    build_parser,
    config_from_args,
)


def parse(*args: str) -> FacadeConfig:
    return config_from_args(build_parser().parse_args(args))


def test_defaults_are_those_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIRSTTOKEN_API_KEY", raising=False)
    assert parse() == FacadeConfig()


def test_flags_reach_the_config() -> None:
    config = parse(
        *("--engine", "h:7", "--port", "0", "--api-key", "k", "--strict-params"),
        *("--served-model-name", "a", "--served-model-name", "b", "--shutdown-timeout", "1.5"),
    )
    assert config == FacadeConfig(
        engine="h:7",
        port=0,
        api_key="k",
        strict_params=True,
        served_model_names=("a", "b"),
        shutdown_timeout_seconds=1.5,
    )


def test_every_tool_format_can_be_chosen() -> None:
    assert (AUTO_PARSER, *TOOL_FORMATS) == TOOL_CALL_PARSERS
    assert parse("--tool-call-parser", "mistral").tool_call_parser == "mistral"


def test_the_key_comes_from_the_environment_and_is_never_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FIRSTTOKEN_API_KEY", "from-env")
    assert parse().api_key == "from-env"
    assert parse("--api-key", "given").api_key == "given"
    assert "from-env" not in repr(parse())
    assert "from-env" not in build_parser().format_help()


@pytest.mark.parametrize(
    "args",
    [
        ("--port", "70000"),
        ("--port", "x"),
        ("--engine", "nohost"),
        ("--engine", "host:"),
        ("--trace-sample-ratio", "2"),
        ("--trace-sample-ratio", "nan"),
        ("--max-body-bytes", "0"),
        ("--log-level", "loud"),
        ("--no-such-flag",),
    ],
)
def test_bad_flags_end_with_2_and_say_which(
    args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*args)
    assert caught.value.code == 2
    assert args[0] in capsys.readouterr().err


def test_the_usage_line_is_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    assert capsys.readouterr().out.startswith("usage: firsttoken facade ")


def test_print_flags_describes_every_flag_without_loading_a_server() -> None:
    code = (
        "import sys, http_facade.__main__ as m; sys.argv = ['x', '--print-flags']; "
        "assert m.main() == 0; assert 'aiohttp' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    flags = {entry["dest"]: entry for entry in json.loads(done.stdout)}
    assert flags["port"]["flags"] == ["--port"] and flags["port"]["default"] == 8000
    assert flags["port"]["takes_value"] and not flags["strict_params"]["takes_value"]
    assert flags["served_model_name"]["takes_value"]
    assert all(
        set(f) == {"flags", "dest", "takes_value", "default", "help"} for f in flags.values()
    )
