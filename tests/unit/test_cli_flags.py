"""`serve` deals flags out to their owners and refuses what nobody owns."""

from __future__ import annotations

import json

import pytest

from clients.launch.flags import ServeFlags, UsageError, parse_flags

ENGINE = [
    {"flags": [], "dest": "model", "takes_value": True, "default": None, "help": "the model"},
    {"flags": ["-h", "--help"], "dest": "help", "takes_value": False, "default": None, "help": ""},
    {
        "flags": ["--grpc-port"],
        "dest": "grpc_port",
        "takes_value": True,
        "default": 50051,
        "help": "gRPC port",
    },
    {
        "flags": ["--enable-prefix-caching", "--no-enable-prefix-caching"],
        "dest": "enable_prefix_caching",
        "takes_value": False,
        "default": True,
        "help": "reuse prefixes",
    },
    {
        "flags": ["--log-level"],
        "dest": "log_level",
        "takes_value": True,
        "default": "info",
        "help": "what goes to stderr",
    },
]
FACADE = [
    {"flags": ["--engine"], "dest": "engine", "takes_value": True, "default": "x:1", "help": ""},
    {
        "flags": ["--port"],
        "dest": "port",
        "takes_value": True,
        "default": 8000,
        "help": "HTTP port",
    },
    {
        "flags": ["--shutdown-timeout"],
        "dest": "shutdown_timeout",
        "takes_value": True,
        "default": 30.0,
        "help": None,
    },
    ENGINE[-1],
]


@pytest.fixture
def flags() -> ServeFlags:
    return ServeFlags(parse_flags(json.dumps(ENGINE)), parse_flags(json.dumps(FACADE)))


def test_each_flag_goes_to_its_owner_and_a_shared_one_to_both(flags: ServeFlags) -> None:
    given = flags.split(
        [
            *["--port", "9000", "my-model", "--grpc-port=1", "--log-level", "debug"],
            "--no-enable-prefix-caching",
        ]
    )
    assert given.model == "my-model"
    assert given.engine == ("--grpc-port=1", "--log-level=debug", "--no-enable-prefix-caching")
    assert given.facade == ("--port=9000", "--log-level=debug")


def test_nothing_given_leaves_the_defaults_to_their_owners(flags: ServeFlags) -> None:
    given = flags.split([])
    assert (given.model, given.engine, given.facade) == (None, (), ())
    assert (given.number("port"), given.number("grpc_port")) == (8000, 50051)
    assert given.number("shutdown_timeout") == 30.0


def test_values_may_look_like_anything(flags: ServeFlags) -> None:
    given = flags.split(["--port", "-1", "--log-level=a=b"])
    assert given.facade == ("--port=-1", "--log-level=a=b")
    assert given.number("port") == -1
    assert flags.split(["--port", "eight"]).number("port") is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prot", "1"], r"no flag --prot\. Did you mean --port\?"),
        (["--xyzzy"], r"no flag --xyzzy\. `firsttoken serve --help`"),
        (["--engine", "host:1"], "belongs to `firsttoken facade`"),
        (["--print-flags"], "no flag --print-flags"),
        (["--port"], "--port needs a value"),
        (["--enable-prefix-caching=yes"], "takes no value"),
        (["one", "two"], "One MODEL is served, but one and two are given"),
    ],
)
def test_a_wrong_command_line_is_said(flags: ServeFlags, arguments: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        flags.split(arguments)


def test_help_names_every_flag_once_with_its_default(flags: ServeFlags) -> None:
    text = flags.help_text()
    for name in ("--grpc-port GRPC_PORT", "--port PORT", "--log-level LOG_LEVEL"):
        assert text.count(name) == 1
    assert "gRPC port (default: 50051)" in text
    assert "--enable-prefix-caching, --no-enable-prefix-caching\n" in text
    assert "--engine " not in text
    assert text.index("Both:") < text.index("--log-level") < text.index("Facade (HTTP):")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"dest": "x"}]', "Traceback"])
def test_what_is_no_list_of_flags_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_flags(text)
