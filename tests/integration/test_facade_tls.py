"""TLS of the facade's socket: verified answers, streams, clients that leave, a new certificate."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest

from access.certificates import CertificateError
from clients.testing import Accept, Emit, FakeEngine, Hang, Outcome, Progress, Script
from http_facade.edge import EdgeConfig
from http_facade.engine_address import parse_engine
from http_facade.flags import FacadeConfig
from http_facade.server import RunningFacade, running_facade
from tests.certificates import Authority, key_of
from tests.facade_harness import CHAT, MODEL, chat


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def served(
    model_dir: Path, edge: EdgeConfig, tls: ssl.SSLContext
) -> AsyncIterator[tuple[FakeEngine, RunningFacade, aiohttp.ClientSession]]:
    connector = aiohttp.TCPConnector(ssl=tls)
    async with (
        FakeEngine(model_dir, model=MODEL) as fake,
        running_facade(
            FacadeConfig(engines=(parse_engine(fake.target),), port=0, edge=edge)
        ) as running,
        aiohttp.ClientSession(running.url, connector=connector) as session,
    ):
        while (await session.get("/readyz")).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        yield fake, running, session


def edge_of(certificate: Path) -> EdgeConfig:
    return EdgeConfig(ssl_certfile=certificate, ssl_keyfile=key_of(certificate))


def serial_number(port: int, tls: ssl.SSLContext, name: str | None = "127.0.0.1") -> str:
    """Of the certificate that a new connection is shown."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
        tls.wrap_socket(plain, server_hostname=name) as encrypted,
    ):
        certificate = encrypted.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


async def test_answers_streams_and_clients_that_leave(
    embedded_model_dir: Path, authority: Authority
) -> None:
    edge = edge_of(authority.issue("server", "127.0.0.1"))
    async with served(embedded_model_dir, edge, authority.client_context()) as (fake, running, s):
        assert running.url.startswith("https://127.0.0.1:")
        fake.script(Script.of_tokens([504, 505]))
        async with s.post(CHAT, json=chat()) as answer:
            assert answer.status == 200
        async with s.post(CHAT, json=chat(stream=True)) as answer:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        fake.script(Script((Accept(), Progress(), Emit([504]), Hang())))
        fake.calls.clear()
        async with s.post(CHAT, json=chat(stream=True)) as answer:
            await answer.content.readuntil(b"content")
            answer.close()
        assert await fake.calls[0].wait_closed() is Outcome.CANCELLED
        # who doesn't know the authority, or speaks plain HTTP, is not served
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.to_thread(serial_number, running.port, ssl.create_default_context())
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" not in await reader.read()
        writer.close()


async def test_a_new_certificate_is_taken_and_a_broken_one_is_not(
    embedded_model_dir: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    tls = authority.client_context()
    certificate = authority.issue("server", "127.0.0.1")
    nameless = authority.client_context()
    nameless.check_hostname = False
    async with served(embedded_model_dir, edge_of(certificate), tls) as (fake, running, session):
        before = await asyncio.to_thread(serial_number, running.port, tls)
        fake.script(Script.of_tokens([504] * 30, delay_seconds=0.1))
        streaming = asyncio.create_task(read_all(session))
        await fake.wait_for_calls(1)
        key_of(certificate).write_bytes(b"no key")
        await until_said(caplog, "the certificate stays as it was")
        assert await asyncio.to_thread(serial_number, running.port, tls) == before
        authority.issue("server", "127.0.0.1")
        deadline = time.monotonic() + 20
        while (after := await asyncio.to_thread(serial_number, running.port, tls)) == before:
            assert time.monotonic() < deadline, "the old certificate is still shown"
            await asyncio.sleep(0.1)
        # also to a client that names no host
        assert await asyncio.to_thread(serial_number, running.port, nameless, None) == after
        assert (await streaming).endswith(b"data: [DONE]\n\n")  # it began with the old one


async def until_said(caplog: pytest.LogCaptureFixture, what: str) -> None:
    deadline = time.monotonic() + 20
    while what not in caplog.text:
        assert time.monotonic() < deadline, caplog.text
        await asyncio.sleep(0.05)


async def read_all(session: aiohttp.ClientSession) -> bytes:
    async with session.post(CHAT, json=chat(stream=True)) as answer:
        return await answer.read()


async def test_files_that_cannot_be_used_stop_a_start(
    embedded_model_dir: Path, authority: Authority, tmp_path: Path
) -> None:
    one, two = authority.issue("one", "127.0.0.1"), authority.issue("two", "127.0.0.1")
    for certificate, key in ((one, key_of(two)), (one, tmp_path / "none.key"), (key_of(one), one)):
        edge = EdgeConfig(ssl_certfile=certificate, ssl_keyfile=key)
        with pytest.raises(CertificateError, match=str(key)):
            async with running_facade(FacadeConfig(port=0, edge=edge)):
                pass
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "http_facade", "--port=0"),
        *(f"--ssl-certfile={one}", f"--ssl-keyfile={key_of(two)}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2 and output == b""
    assert b"error: " in errors and b"Traceback" not in errors


async def test_the_process_says_https(embedded_model_dir: Path, authority: Authority) -> None:
    certificate = authority.issue("server", "127.0.0.1")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "http_facade", "--port=0"),
        *(f"--ssl-certfile={certificate}", f"--ssl-keyfile={key_of(certificate)}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        where = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
        connector = aiohttp.TCPConnector(ssl=authority.client_context())
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get(where["http"] + "/healthz") as answer,
        ):
            assert answer.status == 200
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_tls_and_a_key_to_the_engine(
    embedded_model_dir: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Mutual TLS and the facade's own key; the engine shows who is refused without either."""
    caplog.set_level(logging.WARNING)
    engine, ours = authority.issue("engine", "engine.test"), authority.issue("facade", "facade")
    credentials = grpc.ssl_server_credentials(
        [(key_of(engine).read_bytes(), engine.read_bytes())],
        root_certificates=authority.root_pem,
        require_client_auth=True,
    )
    trusted = {
        "engine_api_key": "engine-key",
        "engine_ssl_ca": str(authority.root),
        "engine_ssl_server_name": "engine.test",
        "engine_ssl_certfile": ours,
        "engine_ssl_keyfile": key_of(ours),
    }
    async with FakeEngine(
        embedded_model_dir, model=MODEL, token="engine-key", server_credentials=credentials
    ) as fake:
        engines = (parse_engine(fake.target),)
        without_certificate = {name: value for name, value in trusted.items() if "file" not in name}
        for fields, is_served in (
            (trusted, True),
            ({**trusted, "engine_api_key": "wrong"}, False),
            (without_certificate, False),
            ({"engine_api_key": "engine-key"}, False),
        ):
            edge = EdgeConfig(**fields)
            assert "engine-key" not in repr(edge)
            config = FacadeConfig(engines=engines, port=0, edge=edge)
            async with running_facade(config) as running, aiohttp.ClientSession() as session:
                deadline = time.monotonic() + (30 if is_served else 1)
                status = 0
                while status != 200 and time.monotonic() < deadline:
                    async with session.get(running.url + "/readyz") as answer:
                        status = answer.status
                    await asyncio.sleep(0.05)
                assert (status == 200) is is_served, fields
                fake.script(Script.of_tokens([504]))
                async with session.post(running.url + CHAT, json=chat()) as answer:
                    assert (answer.status == 200) is is_served
                    assert is_served or answer.status == 503


async def test_new_certificates_for_the_engine_are_taken(
    embedded_model_dir: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine takes the clients of another authority; a broken pair is not taken."""
    (authority.directory / "others").mkdir()
    others = Authority(authority.directory / "others")
    engine, ours = authority.issue("engine", "engine.test"), authority.issue("facade", "facade")
    credentials = grpc.ssl_server_credentials(
        [(key_of(engine).read_bytes(), engine.read_bytes())],
        root_certificates=others.root_pem,
        require_client_auth=True,
    )
    edge = EdgeConfig(
        engine_ssl_ca=str(authority.root),
        engine_ssl_server_name="engine.test",
        engine_ssl_certfile=ours,
        engine_ssl_keyfile=key_of(ours),
    )
    async with FakeEngine(embedded_model_dir, model=MODEL, server_credentials=credentials) as fake:
        config = FacadeConfig(engines=(parse_engine(fake.target),), port=0, edge=edge)
        async with running_facade(config) as running, aiohttp.ClientSession(running.url) as session:
            replacement = others.issue("facade", "facade")
            key_of(ours).write_bytes(b"no key")
            await until_said(caplog, "the certificates for engines stay as they were")
            assert (await session.get("/readyz")).status == 503
            key_of(ours).write_bytes(key_of(replacement).read_bytes())
            ours.write_bytes(replacement.read_bytes())
            async with asyncio.timeout(30):
                while (await session.get("/readyz")).status != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize("broken", ["root.pem", "facade.pem", "facade.key"])
async def test_certificates_for_the_engine_that_cannot_be_used_stop_a_start(
    authority: Authority, broken: str
) -> None:
    ours = authority.issue("facade", "facade")
    edge = EdgeConfig(
        engine_ssl_ca=str(authority.root), engine_ssl_certfile=ours, engine_ssl_keyfile=key_of(ours)
    )
    (authority.directory / broken).write_bytes(b"nothing")
    with pytest.raises(CertificateError, match="no certificates that can be used"):
        async with running_facade(FacadeConfig(port=0, edge=edge)):
            pass
