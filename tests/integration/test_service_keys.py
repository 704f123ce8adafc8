"""Who may call the engine over gRPC: keys, tenants, TLS and mutual TLS; files that change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import msgspec
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from access.keys import ApiKey, digest_of, plain_keys
from clients import (
    ClientOptions,
    EngineClient,
    EngineUnavailable,
    Finished,
    GenerateRequest,
    PermissionDenied,
    RateLimited,
    SamplingParams,
    StoppingCriteria,
    TlsOptions,
    Unauthenticated,
)
from engine_service.config import CacheConfig, EdgeConfig
from engine_service.service import EngineService, ServiceStartError
from tests.certificates import Authority, key_of
from tests.conftest import MakeTinyModel
from tests.running_engine import ENDLESS, LONG_CONTEXT, service_config

PLAIN, OTHER, FACADE, OPERATOR = "plain-key", "other-key", "facade-key", "operator-key"
FILE = f"""
keys:
  - {{id: other, key: {OTHER}, tenant: others, priority: 4}}
  - {{id: operator, key: {OPERATOR}, admin: true}}
"""


@contextlib.asynccontextmanager
async def engine(tiny_model_dir: MakeTinyModel, edge: EdgeConfig) -> AsyncIterator[EngineService]:
    config = service_config(
        tiny_model_dir("llama", **LONG_CONTEXT), edge=edge, core_in_process=True
    )
    core = msgspec.structs.replace(config.core, cache=CacheConfig(num_blocks=8192))
    config = msgspec.structs.replace(config, core=core)
    async with EngineService(config) as running:
        yield running


def closed_edge(keys_file: Path) -> EdgeConfig:
    keys_file.write_text(FILE)
    return EdgeConfig(
        api_keys=plain_keys([PLAIN]),
        api_keys_file=keys_file,
        trusted_key_digest=digest_of(FACADE),
    )


def with_key(running: EngineService, key: str | None, **options: object) -> EngineClient:
    given = ClientOptions(token=key, max_attempts=1, **options)  # type: ignore[arg-type]
    return EngineClient(running.grpc_address, options=given)


def prompt(tenant: str = "", max_tokens: int = 2, **fields: object) -> GenerateRequest:
    stopping = StoppingCriteria(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(
        prompt=tuple(range(5, 69)),
        tenant=tenant,
        stopping=stopping,
        **fields,  # type: ignore[arg-type]
    )


async def cached_tokens(engine_client: EngineClient, request: GenerateRequest) -> int:
    async with engine_client.generate(request) as stream:
        (finished,) = [event async for event in stream if isinstance(event, Finished)]
        return finished.usage.cached_tokens


async def test_keys_and_what_they_open(tiny_model_dir: MakeTinyModel, tmp_path: Path) -> None:
    async with engine(tiny_model_dir, closed_edge(tmp_path / "keys.yaml")) as running:
        for wrong in (None, "wrong", PLAIN[:-1]):
            async with with_key(running, wrong) as nobody:
                for call in (nobody.get_load, nobody.get_model_info, nobody.get_tokenizer):
                    with pytest.raises(Unauthenticated) as caught:
                        await call()
                    assert caught.value.reason == "UNAUTHENTICATED"
                with pytest.raises(Unauthenticated):
                    await cached_tokens(nobody, prompt())
                with pytest.raises(Unauthenticated):
                    await nobody.abort("some-request")
                with pytest.raises(Unauthenticated):
                    await anext(nobody.watch_load())
                await nobody.wait_ready(30)  # health is open
        for key in (PLAIN, OTHER, FACADE, OPERATOR):
            async with with_key(running, key) as somebody:
                assert (await somebody.get_load()).ready
                assert await cached_tokens(somebody, prompt()) == 0  # each its own prefixes
                assert await cached_tokens(somebody, prompt()) >= 48
        for admin_key in (None, PLAIN, FACADE):
            async with with_key(running, PLAIN, admin_key=admin_key) as plain:
                with pytest.raises(PermissionDenied):
                    await plain.flush_prefix_cache()
        async with with_key(running, OPERATOR, admin_key=OPERATOR) as operator:
            assert await operator.flush_prefix_cache() > 0


async def test_reflection_and_unknown_methods_take_a_key(
    tiny_model_dir: MakeTinyModel, tmp_path: Path
) -> None:
    async with (
        engine(tiny_model_dir, closed_edge(tmp_path / "keys.yaml")) as running,
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        unknown = channel.unary_unary(
            "/firsttoken.v1.Engine/NoSuchThing",
            request_serializer=bytes,
            response_deserializer=bytes,
        )
        for key, is_let_in in ((None, False), (PLAIN, True)):
            metadata = () if key is None else (("authorization", f"Bearer {key}"),)
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            call = reflection(iter([question]), metadata=metadata)
            if is_let_in:
                (answer,) = [message async for message in call]
                assert len(answer.list_services_response.service) >= 4
            else:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    [message async for message in call]
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await unknown(b"", metadata=metadata)
            expected = "UNIMPLEMENTED" if is_let_in else "UNAUTHENTICATED"
            assert caught.value.code().name == expected


async def test_only_a_trusted_key_speaks_for_others(
    tiny_model_dir: MakeTinyModel, tmp_path: Path
) -> None:
    async with (
        engine(tiny_model_dir, closed_edge(tmp_path / "keys.yaml")) as running,
        with_key(running, PLAIN) as plain,
        with_key(running, OTHER) as other,
        with_key(running, FACADE) as facade,
    ):
        with pytest.raises(PermissionDenied) as caught:
            await cached_tokens(plain, prompt(tenant="others"))
        assert [it.field for it in caught.value.field_violations] == ["tenant"]
        await cached_tokens(other, prompt(tenant="others"))  # its own
        # whoever may speak for it meets what it has cached; a salt brings nobody there
        assert await cached_tokens(facade, prompt(tenant="others")) >= 48
        assert await cached_tokens(plain, prompt(cache_salt="others")) == 0
        assert await cached_tokens(facade, prompt(tenant="third")) == 0
        # nobody ends another tenant's request, but who speaks for it
        async with other.generate(prompt(request_id="long", max_tokens=ENDLESS)) as stream:
            await stream.wait_accepted()
            await plain.abort("long")
            await asyncio.sleep(0.2)
            assert (await plain.get_load()).num_requests == 1
            await facade.abort("long")
            (finished,) = [event async for event in stream if isinstance(event, Finished)]
            assert finished.reason.name == "ABORT"


async def test_limits_of_a_key(tiny_model_dir: MakeTinyModel, tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.yaml"
    rewrite(
        keys_file,
        """
keys:
  - {id: requests, key: k-requests, requests_per_minute: 240}
  - {id: tokens, key: k-tokens, tokens_per_minute: 6000}
  - {id: places, key: k-places, max_concurrent_requests: 1}
""",
    )
    async with engine(tiny_model_dir, EdgeConfig(api_keys_file=keys_file)) as running:
        async with with_key(running, "k-requests", max_retry_wait_seconds=0) as client:
            with pytest.raises(RateLimited, match="240 requests of the minute") as caught:
                await ask_often(client, 1_000)
            assert caught.value.reason == "RATE_LIMIT_EXCEEDED"
            hint = caught.value.retry_after_seconds
            assert hint is not None and 0 < hint <= 0.25
            await asyncio.sleep(hint)
            await cached_tokens(client, prompt(max_tokens=1))  # the hint was true
            assert (await client.get_load()).ready  # what only reads is not counted
        async with with_key(running, "k-tokens") as client:
            for _ in range(5):  # 1,964 are reserved, and most of it is given back
                async with client.generate(prompt(max_tokens=1900)) as stream:
                    await stream.wait_accepted()
                await idle(client)
            four = SamplingParams(n=4)
            async with client.generate(prompt(max_tokens=1900)) as stream:
                await stream.wait_accepted()  # else a full minute's worth would let it in
                with pytest.raises(RateLimited, match="the request needs 7664"):
                    await cached_tokens(client, prompt(max_tokens=1900, sampling=four))
        async with with_key(running, "k-places") as client:
            async with client.generate(prompt(max_tokens=ENDLESS)) as stream:
                await stream.wait_accepted()
                with pytest.raises(RateLimited, match="1 requests running"):
                    await cached_tokens(client, prompt())
            await idle(client)
            await cached_tokens(client, prompt())


async def ask_often(engine_client: EngineClient, times: int) -> None:
    for _ in range(times):
        await cached_tokens(engine_client, prompt(max_tokens=1))


async def idle(engine_client: EngineClient) -> None:
    deadline = time.monotonic() + 20
    while (await engine_client.get_load()).num_requests:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_changed_keys_file_is_followed(
    tiny_model_dir: MakeTinyModel, tmp_path: Path
) -> None:
    keys_file = tmp_path / "keys.yaml"
    async with (
        engine(tiny_model_dir, closed_edge(keys_file)) as running,
        with_key(running, OTHER) as other,
    ):
        await other.get_load()
        rewrite(keys_file, "keys: []")
        deadline = time.monotonic() + 20
        while await is_let_in(other):
            assert time.monotonic() < deadline, "the old key still opens"
            await asyncio.sleep(0.05)


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)


async def is_let_in(engine_client: EngineClient) -> bool:
    try:
        await engine_client.get_load()
    except Unauthenticated:
        return False
    return True


async def test_bad_files_stop_a_start(tiny_model_dir: MakeTinyModel, tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("keys: [")
    for edge, says in (
        (EdgeConfig(api_keys_file=tmp_path / "keys.yaml"), "is not YAML"),
        (EdgeConfig(ssl_certfile=tmp_path / "none", ssl_keyfile=tmp_path / "none"), "can't be"),
    ):
        with pytest.raises(ServiceStartError, match=says):
            async with engine(tiny_model_dir, edge):
                pass


async def test_an_open_door_is_said_loudly(
    tiny_model_dir: MakeTinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = tiny_model_dir("llama")
    key = ApiKey("k", digest_of("k"), "k")
    for keys in ((), (key,)):
        caplog.clear()
        config = service_config(
            model_dir,
            grpc_host="0.0.0.0",
            core_in_process=True,
            edge=EdgeConfig(api_keys=keys),
        )
        with caplog.at_level(logging.WARNING):
            async with EngineService(config):
                pass
        assert ("ANYONE WHO REACHES 0.0.0.0" in caplog.text) == (keys == ())


# ---------------------------------------------------------------- TLS


def verified(authority: Authority, certificate: Path | None = None) -> TlsOptions:
    return TlsOptions(
        root_certificates=authority.root_pem,
        certificate_chain=certificate.read_bytes() if certificate else None,
        private_key=key_of(certificate).read_bytes() if certificate else None,
    )


async def is_served(running: EngineService, tls: TlsOptions | None) -> bool:
    async with with_key(running, None, tls=tls, call_timeout_seconds=10) as somebody:
        try:
            await somebody.get_load()
        except EngineUnavailable:
            return False
        return True


async def test_tls_with_a_certificate_that_is_replaced(
    tiny_model_dir: MakeTinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    certificate = old.issue("engine", "127.0.0.1")
    edge = EdgeConfig(ssl_certfile=certificate, ssl_keyfile=key_of(certificate))
    async with (
        engine(tiny_model_dir, edge) as running,
        with_key(running, None, tls=verified(old)) as early,
    ):
        assert (await early.get_load()).ready
        assert not await is_served(running, None)
        assert not await is_served(running, verified(new))
        certificate.write_bytes(b"half a fi")
        assert await is_served(running, verified(old))
        assert "the certificate stays as it was" in caplog.text
        new.directory = old.directory
        new.issue("engine", "127.0.0.1")
        assert await is_served(running, verified(new))
        assert not await is_served(running, verified(old))
        assert (await early.get_load()).ready  # its connection is open since before


async def test_mutual_tls(tiny_model_dir: MakeTinyModel, tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path)
    certificate = authority.issue("engine", "127.0.0.1")
    edge = EdgeConfig(
        ssl_certfile=certificate, ssl_keyfile=key_of(certificate), ssl_ca_certs=authority.root
    )
    async with engine(tiny_model_dir, edge) as running:
        assert await is_served(running, verified(authority, authority.issue("known", "c")))
        assert not await is_served(running, verified(authority))
        assert not await is_served(running, verified(authority, stranger.issue("unknown", "c")))
