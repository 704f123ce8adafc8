"""The command line without its children: commands, ports, what it says."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from clients.launch.flags import UsageError
from clients.launch.ports import WantedPort, check_ports
from clients.launch.serve import announcement


def firsttoken(*arguments: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "FIRSTTOKEN_CACHE": str(cache)} if cache else None
    command = [sys.executable, "-m", "clients", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_usage_lists_the_commands(arguments: tuple[str, ...]) -> None:
    answer = firsttoken(*arguments)
    assert answer.returncode == 0
    for command in ("serve [MODEL]", "engine [MODEL]", "facade --engine HOST:PORT", "models"):
        assert command in answer.stdout


def test_version() -> None:
    assert firsttoken("--version").stdout == "firsttoken 0.1.0\n"


def test_an_unknown_command_gets_a_suggestion() -> None:
    answer = firsttoken("serv")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "there is no command serv. Did you mean serve?" in answer.stderr


def test_models_shows_the_store(tmp_path: Path) -> None:
    directory = tmp_path / "models" / "mine"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"torch_dtype": "float16"}')
    answer = firsttoken("models", cache=tmp_path)
    assert answer.returncode == 0
    assert f"float16  {directory}" in answer.stdout
    assert json.loads(firsttoken("models", "--json", cache=tmp_path).stdout)[0]["name"] == "mine"


@pytest.mark.parametrize("command", ["engine", "facade", "models", "control"])
def test_the_usage_line_of_a_command_is_what_was_typed(command: str) -> None:
    answer = firsttoken(command, "--help")
    assert answer.returncode == 0
    assert answer.stdout.startswith(f"usage: firsttoken {command} ")


def test_a_folder_of_the_users_does_not_take_a_packages_place(tmp_path: Path) -> None:
    (tmp_path / "engine_service").mkdir()
    (tmp_path / "engine_service" / "__init__.py").write_text("raise SystemExit(99)")
    command = [str(Path(sys.executable).with_name("firsttoken")), "models"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0


def test_a_port_in_use_names_the_flag_that_changes_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"Port {port} is in use; choose another with --port"):
            check_ports([WantedPort("--port", "127.0.0.1", port)])
    check_ports([WantedPort("--port", "127.0.0.1", port)])


def test_one_port_for_two_listeners_is_said() -> None:
    wanted = [WantedPort("--port", "127.0.0.1", 0), WantedPort("--grpc-port", "127.0.0.1", 0)]
    check_ports(wanted)  # 0 is any free port, twice
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    wanted = [WantedPort(flag, "127.0.0.1", port) for flag in ("--port", "--grpc-port")]
    with pytest.raises(UsageError, match=f"--port and --grpc-port both name port {port}"):
        check_ports(wanted)


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host"])
def test_a_host_that_is_not_ours_is_said(host: str) -> None:
    with pytest.raises(UsageError, match="--port: cannot listen on"):
        check_ports([WantedPort("--port", host, 45678)])


@pytest.mark.parametrize("has_key", [False, True])
def test_the_announced_curl_line_can_be_pasted(has_key: bool) -> None:
    engine_at = {"grpc": "127.0.0.1:5", "metrics": "127.0.0.1:6", "model": "it's mine"}
    text = announcement(engine_at, {"http": "http://127.0.0.1:7"}, has_key)
    assert "gRPC               127.0.0.1:5\n" in text
    assert "http://127.0.0.1:6/metrics\n" in text
    (line,) = [line for line in text.splitlines() if "curl" in line]
    words = shlex.split(line)
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:7/v1/chat/completions"]
    assert ("Authorization: Bearer $FIRSTTOKEN_API_KEY" in words) == has_key
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["stream"]) == ("it's mine", True)
