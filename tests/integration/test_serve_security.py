"""`firsttoken serve` with keys and TLS at both edges: what it hands on to whom."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from clients import ClientOptions, EngineClient, EngineUnavailable, TlsOptions, Unauthenticated
from tests.certificates import Authority, key_of
from tests.conftest import MakeTinyModel

KEY, OPERATOR = "user-key", "operator-key"
ANY_PORTS = ("--port=0", "--grpc-port=0", "--engine-metrics-port=0")


@dataclass
class Secured:
    http: str
    grpc: str
    model: str
    authority: Authority
    process: subprocess.Popen[str]
    log: Path


@pytest.fixture
def secured(tiny_model_dir: MakeTinyModel, tmp_path: Path) -> Iterator[Secured]:
    authority = Authority(tmp_path)
    certificate = authority.issue("both", "127.0.0.1")
    log = tmp_path / "log"
    model_dir = tiny_model_dir("llama")
    command = [
        *(sys.executable, "-m", "clients", "serve", str(model_dir), *ANY_PORTS),
        *(f"--api-key={KEY}", f"--admin-key={OPERATOR}", "--num-threads=1"),
        *(f"--ssl-certfile={certificate}", f"--ssl-keyfile={key_of(certificate)}"),
        *(f"--grpc-ssl-certfile={certificate}", f"--grpc-ssl-keyfile={key_of(certificate)}"),
        f"--engine-ssl-ca={authority.root}",
    ]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    lines: list[str] = []
    try:
        while not lines or "Ctrl-C" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], log.read_text()
        words = {line.split()[0]: line.split()[-1] for line in lines if line.startswith("  ")}
        yield Secured(
            words["HTTP"].removesuffix("/v1"),
            words["gRPC"],
            model_dir.name,
            authority,
            process,
            log,
        )
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
        process.stdout.close()


def over_tls(secured: Secured, token: str | None) -> EngineClient:
    tls = TlsOptions(root_certificates=secured.authority.root_pem)
    return EngineClient(secured.grpc, options=ClientOptions(token=token, tls=tls, max_attempts=1))


async def completion_status(secured: Secured, key: str | None, tls: ssl.SSLContext) -> int:
    body = {"model": secured.model, "prompt": [5, 6], "max_tokens": 2}
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session,
        session.post(secured.http + "/v1/completions", json=body, headers=headers) as answer,
    ):
        await answer.read()
        return answer.status


async def test_keys_and_tls_hold_at_both_edges(secured: Secured) -> None:
    assert secured.http.startswith("https://")
    tls = secured.authority.client_context()
    assert await completion_status(secured, KEY, tls) == 200
    assert await completion_status(secured, None, tls) == 401
    for token, is_let_in in ((KEY, True), (OPERATOR, True), (None, False), ("wrong", False)):
        async with over_tls(secured, token) as client:
            if is_let_in:
                assert (await client.get_load()).ready
            else:
                with pytest.raises(Unauthenticated):
                    await client.get_load()
    async with EngineClient(
        secured.grpc, options=ClientOptions(token=KEY, max_attempts=1)
    ) as plain:
        with pytest.raises(EngineUnavailable):
            await plain.get_load()
    drained = await control(secured, "drain")
    assert (drained.returncode, drained.stderr) == (0, "")
    assert await asyncio.to_thread(secured.process.wait, 30) == 0
    log = secured.log.read_text()
    assert "Traceback" not in log
    for secret in (KEY, OPERATOR):
        assert secret not in log


async def control(secured: Secured, action: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clients", "control", action, f"--engine={secured.grpc}"]
    command += [f"--ssl-ca={secured.authority.root}"]
    environment = {**os.environ, "FIRSTTOKEN_ADMIN_KEY": OPERATOR}
    return await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--grpc-ssl-certfile=c", "--grpc-ssl-keyfile=k"), "--engine-ssl-ca"),
        (("--engine-api-key=k",), "There is no flag --engine-api-key"),
        (("--api-key=two words",), "--api-key"),
    ],
)
def test_flags_that_serve_cannot_hand_on(flags: tuple[str, ...], says: str) -> None:
    command = [sys.executable, "-m", "clients", "serve", *ANY_PORTS, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr


def test_a_new_key_from_the_command_line() -> None:
    command = [sys.executable, "-m", "clients", "keys", "new", "--id=alice"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith('- id: "alice"\n  sha256: "')
    assert json.loads(done.stdout.splitlines()[0].partition(": ")[2]) == "alice"
