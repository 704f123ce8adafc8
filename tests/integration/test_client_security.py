"""Tokens and TLS, against a scripted engine that demands them."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from pathlib import Path

import grpc
import pytest

from clients import (
    CallCancelled,
    ClientOptions,
    EngineClient,
    EngineUnavailable,
    Finished,
    TlsOptions,
    Unauthenticated,
)
from clients.testing import Accept, Emit, FakeEngine, Hang, Outcome, Script
from tests.certificates import Authority, key_of
from tests.client_pair import all_events, connected, prompt


async def test_a_token_is_demanded_and_given() -> None:
    tokens = iter(("first", "second"))
    async with FakeEngine(token="first") as fake:
        for token in (None, "wrong", "first" * 2):
            async with EngineClient(fake.target, options=ClientOptions(token=token)) as client:
                with pytest.raises(Unauthenticated):
                    await client.get_load()
                with pytest.raises(Unauthenticated):
                    await all_events(client.generate(prompt()))
        options = ClientOptions(token=lambda: next(tokens))
        async with EngineClient(fake.target, options=options) as client:
            await all_events(client.generate(prompt()))
            fake.token = "second"  # rotated: the provider is asked for each call
            await client.get_load()


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "schlüssel"])
async def test_a_token_that_cannot_travel_is_refused_unseen(
    token: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with connected(ClientOptions(token=token)) as (fake, client):
        with pytest.raises(ValueError, match="printable ASCII") as refusal:
            await all_events(client.generate(prompt()))
        assert not token or token not in str(refusal.value)
        assert not token or token not in caplog.text
        assert not fake.calls


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for the name `engine.test`, and one for a client, each its own authority."""
    directory = tmp_path_factory.mktemp("certificates")
    for name in ("engine", "client"):
        subprocess.run(
            (
                *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"),
                *("-pkeyopt", "ec_paramgen_curve:P-256", "-subj", f"/CN={name}.test"),
                *("-addext", f"subjectAltName=DNS:{name}.test"),
                *("-keyout", f"{name}.key", "-out", f"{name}.pem"),
            ),
            cwd=directory,
            check=True,
            capture_output=True,
        )
    return directory


async def test_tls_is_verified(certificates: Path) -> None:
    certificate = (certificates / "engine.pem").read_bytes()
    credentials = grpc.ssl_server_credentials(
        [((certificates / "engine.key").read_bytes(), certificate)]
    )
    async with FakeEngine(server_credentials=credentials) as fake:
        trusted = TlsOptions(root_certificates=certificate, server_name="engine.test")
        async with EngineClient(fake.target, options=ClientOptions(tls=trusted)) as client:
            await client.wait_ready(5.0)
            await all_events(client.generate(prompt()))
        for tls in (
            None,
            TlsOptions(server_name="engine.test"),
            TlsOptions(root_certificates=certificate, server_name="other.test"),
        ):
            options = ClientOptions(tls=tls, max_attempts=1)
            async with EngineClient(fake.target, options=options) as client:
                with pytest.raises(EngineUnavailable):
                    await client.get_load()


async def test_mutual_tls(certificates: Path) -> None:
    engine, client_pem = (
        (certificates / f"{name}.pem").read_bytes() for name in ("engine", "client")
    )
    credentials = grpc.ssl_server_credentials(
        [((certificates / "engine.key").read_bytes(), engine)],
        root_certificates=client_pem,
        require_client_auth=True,
    )
    known = TlsOptions(
        root_certificates=engine,
        certificate_chain=client_pem,
        private_key=(certificates / "client.key").read_bytes(),
        server_name="engine.test",
    )
    unknown = TlsOptions(root_certificates=engine, server_name="engine.test")
    async with FakeEngine(server_credentials=credentials) as fake:
        async with EngineClient(fake.target, options=ClientOptions(tls=known)) as client:
            assert (await client.get_load()).ready
        options = ClientOptions(tls=unknown, max_attempts=1)
        async with EngineClient(fake.target, options=options) as client:
            with pytest.raises(EngineUnavailable):
                await client.get_load()


async def test_new_certificates_are_for_new_calls(tmp_path: Path) -> None:
    """What runs goes on over the connection that it began with, until the client is closed."""
    authority = Authority(tmp_path)
    engine, ours = authority.issue("engine", "engine.test"), authority.issue("ours", "client")
    strangers = Authority(tmp_path).issue("strangers", "client")
    credentials = grpc.ssl_server_credentials(
        [(key_of(engine).read_bytes(), engine.read_bytes())],
        root_certificates=authority.root_pem,
        require_client_auth=True,
    )
    tls = [mutual_tls(authority, ours)]
    options = ClientOptions(tls=lambda: tls[0], max_attempts=1)
    async with FakeEngine(server_credentials=credentials) as fake:
        async with EngineClient(fake.target, options=options) as client:
            fake.script(Script.of_tokens(range(10), delay_seconds=0.1))
            running = asyncio.create_task(all_events(client.generate(prompt())))
            await fake.wait_for_calls(1)
            tls[0] = mutual_tls(authority, strangers)
            with pytest.raises(EngineUnavailable):
                await client.get_load()
            tls[0] = mutual_tls(authority, authority.issue("ours", "client"))
            assert (await client.get_load()).ready
            assert isinstance((await running)[-1], Finished)

            fake.script(Script((Accept(), Emit([1]), Hang())))
            left = asyncio.create_task(all_events(client.generate(prompt())))
            call = (await fake.wait_for_calls(2))[1]
            tls[0] = mutual_tls(authority, authority.issue("ours", "client"))
            assert (await client.get_load()).ready
        with pytest.raises(CallCancelled):
            await left
        assert await call.wait_closed() is Outcome.CANCELLED


def mutual_tls(authority: Authority, certificate: Path) -> TlsOptions:
    return TlsOptions(
        root_certificates=authority.root_pem,
        certificate_chain=certificate.read_bytes(),
        private_key=key_of(certificate).read_bytes(),
        server_name="engine.test",
    )
