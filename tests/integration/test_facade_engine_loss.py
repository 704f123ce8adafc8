"""The facade without its engine: it starts, says so, and finds the engine (again) by itself."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from pathlib import Path

import pytest

from clients.errors import TokenizerStale
from clients.testing import Accept, Emit, FakeEngine, Hang, Progress, Script
from clients.text.tokenizer import Tokenizer
from clients.types import TokenizerBundle
from http_facade.engine_address import parse_engine
from http_facade.flags import FacadeConfig
from http_facade.server import running_facade
from tests.facade_harness import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Harness,
    chat,
    check_envelope,
    completion,
    facade_and_fake,
    prompt_ids,
    text_of,
)
from tests.serving import free_port


async def not_ready(facade: Harness, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (await facade.get("/readyz"))[0] != 503:
        assert time.monotonic() < deadline, "still ready"
        await asyncio.sleep(0.02)


async def test_it_starts_before_its_engine_and_connects_when_that_comes(
    embedded_model_dir: Path,
) -> None:
    fake = FakeEngine(embedded_model_dir, model=MODEL)
    fake._port = free_port()
    tok = Tokenizer.from_files(fake.tokenizer.files)
    async with running_facade(
        FacadeConfig(engines=(parse_engine(fake.target),), port=0)
    ) as running:
        facade = Harness(fake, running, tok)
        assert (await facade.get("/healthz"))[0] == 200
        for path in ("/readyz", "/v1/models"):
            status, raw, headers = await facade.get(path)
            assert check_envelope(status, json.loads(raw), 503)["code"] == "engine_unavailable"
            assert int(headers["Retry-After"]) >= 1
        status, body, headers = await facade.post(CHAT, chat(stream=True))
        check_envelope(status, body, 503)
        assert headers["x-should-retry"] == "true"
        async with fake:
            await facade.wait_ready(30)
            facade.say("here now")
            _, body, _ = await facade.post(CHAT, chat())
            assert text_of(body) == "here now"


async def test_an_engine_that_still_loads_is_no_engine_lost(
    embedded_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fake = FakeEngine(embedded_model_dir, model=MODEL)
    await fake.set_serving(False)
    tok = Tokenizer.from_files(fake.tokenizer.files)
    async with (
        fake,
        running_facade(FacadeConfig(engines=(parse_engine(fake.target),), port=0)) as running,
    ):
        facade = Harness(fake, running, tok)
        await asyncio.sleep(1.0)
        for path in ("/readyz", "/v1/models"):
            status, raw, _ = await facade.get(path)
            assert check_envelope(status, json.loads(raw), 503)["code"] == "engine_unavailable"
        await fake.set_serving(True)
        await facade.wait_ready(30)
        facade.say("loaded now")
        _, body, _ = await facade.post(CHAT, chat())
        assert text_of(body) == "loaded now"
    assert "lost" not in caplog.text


async def test_an_engine_that_dies_ends_its_streams_and_is_found_again(
    embedded_model_dir: Path,
) -> None:
    async with facade_and_fake(embedded_model_dir) as facade:
        facade.fake.script(Script((Accept(), Progress(), Emit([504]), Hang())))
        streams = [asyncio.create_task(facade.stream(CHAT, chat())) for _ in range(3)]
        whole = asyncio.create_task(facade.post(CHAT, chat()))
        await facade.fake.wait_for_calls(4)
        await asyncio.sleep(0.5)
        began = time.monotonic()
        await facade.fake.kill()
        for answer in await asyncio.gather(*streams):
            assert answer.finish_reasons() == [] and answer.num_done == 1
            assert answer.events[-1]["error"]["code"] == "engine_unavailable"
            assert answer.events[-1]["usage"]["completion_tokens"] == 1
        status, body, _ = await whole
        check_envelope(status, body, 503)
        assert time.monotonic() - began < 30
        await not_ready(facade, 20)
        assert (await facade.get("/healthz"))[0] == 200
        assert (await facade.get("/v1/models"))[0] == 200  # what is known stays known
        status, body, _ = await facade.post(CHAT, chat())
        check_envelope(status, body, 503)

        await facade.fake.start()
        await facade.wait_ready(30)
        facade.say("back again")
        _, body, _ = await facade.post(CHAT, chat())
        assert text_of(body) == "back again"


async def test_an_engine_that_loads_or_drains_is_not_ready(embedded_model_dir: Path) -> None:
    async with facade_and_fake(embedded_model_dir) as facade:
        await facade.fake.set_serving(False)
        await not_ready(facade, 3)
        await facade.fake.set_serving(True)
        await facade.wait_ready(3)


async def test_a_frozen_engine_is_not_ready_until_it_thaws(embedded_model_dir: Path) -> None:
    async with facade_and_fake(embedded_model_dir) as facade:
        facade.fake.freeze()
        await not_ready(facade, 8)
        facade.fake.thaw()
        await facade.wait_ready(30)


async def test_a_stale_tokenizer_is_fetched_again_and_the_request_tried_once_more(
    embedded_model_dir: Path,
) -> None:
    async with facade_and_fake(embedded_model_dir) as facade:
        old = facade.fake.tokenizer
        files = dict(old.files)
        files["chat_template.jinja"] = b"{{ messages[0].content }}!"
        facade.fake.set_tokenizer(TokenizerBundle("another-digest", files))
        facade.say("fine")
        before = await fingerprint(facade)
        for stream in (False, True):
            if stream:
                answer = await facade.stream(CHAT, chat())
                assert answer.text() == "fine"
            else:
                _, body, _ = await facade.post(CHAT, chat())
                assert text_of(body) == "fine"
        request = facade.fake.requests[-1]
        assert request.tokenizer_digest == "another-digest"
        assert facade.tok.decode(prompt_ids(request.prompt)) == "Hi!"
        assert await fingerprint(facade) == before


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_a_tokenizer_that_is_stale_again_is_a_reason_to_come_back(
    embedded_model_dir: Path, streamed: bool
) -> None:
    """Replaced twice within one request: that is no fault of anybody's, and soon over."""
    async with facade_and_fake(embedded_model_dir) as facade:
        facade.fake.script(Script.failing(TokenizerStale("stale", reason="TOKENIZER_STALE")))
        status, body, headers = await facade.post(CHAT, chat(stream=streamed))
        assert check_envelope(status, body, 503)["code"] == "engine_unavailable"
        assert headers["Retry-After"] and headers["x-should-retry"] == "true"


async def fingerprint(facade: Harness) -> str:
    _, body, _ = await facade.post(CHAT, chat())
    value: str = body["system_fingerprint"]
    return value


async def test_another_model_after_a_restart_is_served_under_its_own_name(
    embedded_model_dir: Path,
) -> None:
    async with facade_and_fake(embedded_model_dir, served_model_names=("alias",)) as facade:
        facade.say("fine")
        assert [m["id"] for m in await models(facade)] == [MODEL, "alias"]
        _, body, _ = await facade.post(CHAT, {**chat(), "model": "alias"})
        assert body["model"] == "alias" and facade.fake.requests[-1].model == MODEL
        before = body["system_fingerprint"]

        await facade.fake.kill()
        await not_ready(facade, 20)
        facade.fake.model_info = dataclasses.replace(
            facade.fake.model_info, model="other", weights_digest="others"
        )
        await facade.fake.start()
        await facade.wait_ready(30)
        assert [m["id"] for m in await models(facade)] == ["other", "alias"]
        _, body, _ = await facade.post(CHAT, {**chat(), "model": "alias"})
        assert body["system_fingerprint"] != before
        status, body, _ = await facade.post(CHAT, chat())
        check_envelope(status, body, 404, "model")


async def models(facade: Harness) -> list[dict[str, object]]:
    _, raw, _ = await facade.get("/v1/models")
    data: list[dict[str, object]] = json.loads(raw)["data"]
    return data


async def test_a_model_without_template_serves_completions_only(embedded_model_dir: Path) -> None:
    async with facade_and_fake(embedded_model_dir) as facade:
        files = dict(facade.fake.tokenizer.files)
        del files["chat_template.jinja"]
        facade.fake.set_tokenizer(TokenizerBundle("no-template", files))
        facade.say("fine")
        status, _, _ = await facade.post(COMPLETIONS, completion())
        assert status == 200
        status, body, _ = await facade.post(CHAT, chat())
        assert "/v1/completions" in check_envelope(status, body, 400, "messages")["message"]


async def test_a_template_that_refuses_is_the_callers_error(embedded_model_dir: Path) -> None:
    async with facade_and_fake(embedded_model_dir) as facade:
        files = dict(facade.fake.tokenizer.files)
        files["chat_template.jinja"] = b"{{ raise_exception('roles must alternate') }}"
        facade.fake.set_tokenizer(TokenizerBundle("refusing", files))
        await facade.post(COMPLETIONS, completion())
        status, body, _ = await facade.post(CHAT, chat())
        error = check_envelope(status, body, 400, "messages")
        assert "roles must alternate" in error["message"]
