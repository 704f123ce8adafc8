"""How `--engine` is written."""

from __future__ import annotations

import asyncio
import socket

import pytest

from http_facade.engine_address import EngineAddress, parse_engine
from http_facade.engine_pool import resolve_host
from http_facade.flags import FacadeConfig, build_parser, config_from_args


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:50051", EngineAddress("127.0.0.1", 50051)),
        ("chat=a.example:1", EngineAddress("a.example", 1, "chat")),
        ("[::1]:50051", EngineAddress("[::1]", 50051)),
        ("dns:engines:50051", EngineAddress("engines", 50051, is_dns=True)),
        ("org/model:8b=dns:engines:1", EngineAddress("engines", 1, "org/model:8b", is_dns=True)),
        ("a=b=h:1", EngineAddress("h", 1, "a=b")),
    ],
)
def test_addresses(text: str, expected: EngineAddress) -> None:
    assert parse_engine(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    ["", "h", "h:", ":1", "h:0", "h:65536", "h:x", "h:-1", "::1:50051", "=h:1", "dns:h", "h:١"],
)
def test_bad_addresses_say_what_was_expected(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"\[NAME=\]HOST:PORT"):
        parse_engine(text)
    with pytest.raises(SystemExit):
        build_parser().parse_args([f"--engine={text}"])
    assert "--engine" in capsys.readouterr().err


def test_the_flag_is_repeated() -> None:
    def config(*args: str) -> FacadeConfig:
        return config_from_args(build_parser().parse_args(args))

    given = config("--engine", "a=h:1", "--engine", "a=h:2", "--routing-policy", "round-robin")
    assert given.engines == (EngineAddress("h", 1, "a"), EngineAddress("h", 2, "a"))
    assert given.routing_policy == "round-robin"
    assert config().engines == (EngineAddress("127.0.0.1", 50051),)
    assert config().routing_policy == "prefix"
    with pytest.raises(SystemExit):
        config("--routing-policy", "fastest")
    with pytest.raises(ValueError, match="--engine a=h:1 is given twice"):
        config("--engine=a=h:1", "--engine=h:1", "--engine=a=h:1")


def test_a_name_is_resolved_to_all_its_addresses() -> None:
    found = asyncio.run(resolve_host("localhost", 50051))
    assert "127.0.0.1:50051" in found or "[::1]:50051" in found
    assert len(set(found)) == len(found)
    assert asyncio.run(resolve_host("[::1]", 7)) == ["[::1]:7"]
    with pytest.raises(socket.gaierror):
        asyncio.run(resolve_host("no-such-host.invalid", 1))
