"""The facade's command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from access.keys import plain_keys
from clients.text.tool_parsers import TOOL_FORMATS
from http_facade.edge import EdgeConfig
from http_facade.engine_address import EngineAddress
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
        engines=(EngineAddress("h", 7),),
        port=0,
        edge=EdgeConfig(api_keys=plain_keys(["k"])),
        strict_params=True,
        served_model_names=("a", "b"),
        shutdown_timeout_seconds=1.5,
    )


def test_a_largest_body_must_find_room() -> None:
    config = parse("--max-body-bytes=1000", "--max-total-body-bytes=1000", "--max-connections=7")
    assert (config.max_total_body_bytes, config.max_connections) == (1000, 7)
    with pytest.raises(ValueError, match="--max-total-body-bytes"):
        parse("--max-body-bytes=1000", "--max-total-body-bytes=999")


def test_every_tool_format_can_be_chosen() -> None:
    assert (AUTO_PARSER, *TOOL_FORMATS) == TOOL_CALL_PARSERS
    assert parse("--tool-call-parser", "mistral").tool_call_parser == "mistral"


def test_the_key_comes_from_the_environment_and_is_never_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FIRSTTOKEN_API_KEY", "from-env")
    assert parse().edge.api_keys == plain_keys(["from-env"])
    assert parse("--api-key", "given").edge.api_keys == plain_keys(["given"])
    both = parse("--api-key", "one", "--api-key", "two").edge.api_keys
    assert [key.id for key in both] == ["api-key-1", "api-key-2"]
    assert "from-env" not in repr(parse())
    assert "from-env" not in build_parser().format_help()


def test_flags_of_the_edge() -> None:
    edge = parse(
        *("--api-keys-file", "/k.yaml", "--admin-key", "op", "--engine-api-key", "secret"),
        *("--ssl-certfile", "/c", "--ssl-keyfile", "/k", "--engine-ssl-ca", "system"),
        *("--allowed-origins", "https://a.example/,http://b.example:1", "--access-log", "json"),
    ).edge
    assert edge.allowed_origins == ("https://a.example", "http://b.example:1")
    assert edge.admin_key is not None and edge.admin_key.is_admin
    assert edge.engine_api_key == "secret" and "secret" not in repr(edge)
    assert (edge.access_log, edge.engine_ssl_ca) == ("json", "system")
    assert parse("--allowed-origins", '["*"]').edge.allowed_origins == ("*",)
    for hosts in ("llm.example, *.lan,::1,10.0.0.7", '["llm.example", "*.lan", "::1", "10.0.0.7"]'):
        parsed = parse("--allowed-hosts", hosts).edge.allowed_hosts
        assert parsed == ("llm.example", "*.lan", "::1", "10.0.0.7")
    assert parse("--allowed-hosts", "*").edge.allowed_hosts == ("*",)
    assert parse("--allowed-hosts", "").edge.allowed_hosts == ()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--ssl-certfile", "/c"), "--ssl-certfile and --ssl-keyfile"),
        (("--engine-ssl-keyfile", "/k"), "--engine-ssl-certfile and --engine-ssl-keyfile"),
        (("--engine-ssl-server-name", "a"), "--engine-ssl-ca"),
        (("--log-prompts", "--access-log", "off"), "--log-prompts"),
    ],
)
def test_flags_that_cannot_go_together(args: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(*args)


@pytest.mark.parametrize(
    "args",
    [
        ("--api-key", "two words"),
        ("--engine-api-key", ""),
        ("--allowed-hosts", "http://llm.example"),
        ("--allowed-hosts", "llm.example:8000"),
        ("--allowed-hosts", "[1]"),
        ("--allowed-origins", "app.example"),
        ("--allowed-origins", "[1]"),
        ("--allowed-origins", "[broken"),
        ("--access-log", "xml"),
        ("--max-connections", "0"),
        ("--max-total-body-bytes", "-1"),
        ("--port", "70000"),
        ("--port", "x"),
        ("--engine", "nohost"),
        ("--engine", "host:"),
        ("--trace-sample-ratio", "2"),
        ("--trace-sample-ratio", "nan"),
        ("--max-body-bytes", "0"),
        ("--max-body-bytes", "66060289"),
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
