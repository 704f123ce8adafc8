"""Following an engine through starts, deaths and freezes; its load and its tokenizer."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from clients import EngineClient, EngineUnavailable, InternalError, TokenizerBundle
from clients.testing import FakeEngine
from tests.client_pair import QUICK, connected

WATCHFUL = dataclasses.replace(QUICK, silence_seconds=3.0)


async def test_wait_ready_waits() -> None:
    async with connected() as (fake, client):
        await fake.set_serving(False)
        with pytest.raises(EngineUnavailable, match=r"not ready within 0\.2 seconds"):
            await client.wait_ready(0.2)
        waiting = asyncio.create_task(client.wait_ready(30))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await fake.set_serving(True)
        await asyncio.wait_for(waiting, 10)


async def test_wait_ready_for_an_engine_that_comes_later() -> None:
    fake = FakeEngine()
    await fake.start()
    await fake.kill()
    async with EngineClient(fake.target, options=QUICK) as client:
        waiting = asyncio.create_task(client.wait_ready(30))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await fake.start()
        await asyncio.wait_for(waiting, 10)
    await fake.kill()


async def test_health_is_followed_across_deaths() -> None:
    async with connected() as (fake, client), aclosing(client.watch_health()) as states:

        async def next_state() -> bool:
            return await asyncio.wait_for(anext(states), 10)

        assert await next_state() is True
        await fake.set_serving(False)
        assert await next_state() is False
        await fake.set_serving(True)
        assert await next_state() is True
        for _ in range(2):
            await fake.kill()
            assert await next_state() is False
            await asyncio.sleep(0.3)
            await fake.start()
            assert await next_state() is True


async def test_a_frozen_engine_is_noticed() -> None:
    """It keeps its connection and says nothing."""
    async with connected(WATCHFUL) as (fake, client), aclosing(client.watch_health()) as states:
        assert await anext(states) is True
        fake.freeze()
        assert await asyncio.wait_for(anext(states), 10) is False
        fake.thaw()
        assert await asyncio.wait_for(anext(states), 10) is True


async def test_a_quiet_engine_is_not_taken_for_a_dead_one() -> None:
    async with connected(WATCHFUL) as (_, client), aclosing(client.watch_health()) as states:
        assert await anext(states) is True
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(states), 1.3 * WATCHFUL.silence_seconds)


async def test_closing_the_client_ends_the_watches() -> None:
    async with connected() as (_, client):
        health, load = client.watch_health(), client.watch_load()
        assert await anext(health) is True
        assert (await anext(load)).ready
        ends = [asyncio.create_task(anext(watch, None)) for watch in (health, load)]
        await asyncio.sleep(0.05)
        await client.close()
        assert await asyncio.wait_for(asyncio.gather(*ends), 10) == [None, None]


async def test_load_is_reported_at_once_and_then_each_second() -> None:
    async with connected() as (fake, client):
        fake.load = dataclasses.replace(fake.load, num_running=3, used_blocks=7)
        assert await client.get_load() == fake.load
        waits: list[float] = []
        for _ in range(5):
            start = time.monotonic()
            async with aclosing(client.watch_load()) as reports:
                assert await anext(reports) == fake.load
            waits.append(time.monotonic() - start)
        assert min(waits) < 0.5
        async with asyncio.timeout(10), aclosing(client.watch_load()) as reports:
            await anext(reports)
            fake.load = dataclasses.replace(fake.load, num_running=4)
            while await anext(reports) != fake.load:
                pass


async def test_silence_and_death_end_the_load_reports() -> None:
    async with connected(WATCHFUL) as (fake, client):
        async with aclosing(client.watch_load()) as reports:
            await anext(reports)
            await anext(reports)
            fake.freeze()
            with pytest.raises(EngineUnavailable, match=r"no load report for 3 seconds"):
                await anext(reports)
            fake.thaw()
        async with aclosing(client.watch_load()) as reports:
            await anext(reports)
            await fake.kill()
            with pytest.raises(EngineUnavailable):
                await anext(reports)


async def test_what_the_engine_says_about_itself() -> None:
    async with connected() as (fake, client):
        fake.server_info = dataclasses.replace(fake.server_info, op_backends={"rms_norm": "cpp"})
        assert await client.get_server_info() == fake.server_info
        assert await client.get_model_info() == fake.model_info


async def test_an_engine_of_another_api_version_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected() as (fake, client):
        for version, warnings in (("1.0", 0), ("1.7", 0), ("2.0", 1)):
            fake.server_info = dataclasses.replace(fake.server_info, api_version=version)
            await client.get_server_info()
            assert len(caplog.records) == warnings
        assert "version 2.0" in caplog.text


# ---------------------------------------------------------------- tokenizer


async def test_the_tokenizer_is_that_of_the_directory(embedded_model_dir: Path) -> None:
    async with connected(fake=FakeEngine(embedded_model_dir)) as (_, client):
        bundle = await client.get_tokenizer()
        assert bundle is not None
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            assert bundle.files[name] == (embedded_model_dir / name).read_bytes()
        info = await client.get_model_info()
        assert bundle.digest == info.tokenizer_digest
        assert (info.architecture, info.vocab_size) == ("LlamaForCausalLM", 49152)
        assert info.eos_token_ids == (2,)
        assert await client.get_tokenizer(bundle.digest) is None
        assert await client.get_tokenizer("another") == bundle


async def test_a_tokenizer_of_several_megabytes() -> None:
    files = {"tokenizer.json": os.urandom(9_000_001), "empty.json": b"", "one.json": b"1"}
    async with connected() as (fake, client):
        fake.set_tokenizer(TokenizerBundle("digest", files))
        bundle = await client.get_tokenizer("older")
        assert bundle == TokenizerBundle("digest", files)


async def test_a_torn_tokenizer_is_refused() -> None:
    class Torn(dict[str, bytes]):
        """Announces one byte more than it has."""

        def items(self):  # type: ignore[no-untyped-def]
            return [(name, content + b"!") for name, content in super().items()]

    async with connected() as (fake, client):
        fake.set_tokenizer(TokenizerBundle("digest", Torn({"tokenizer.json": b"12345"})))
        with pytest.raises(InternalError, match="sent 5 bytes of tokenizer files and announced 6"):
            await client.get_tokenizer()
