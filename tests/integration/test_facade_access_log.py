"""The access log: one line per request, however it ended, with ids in place of keys."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from access.keys import plain_keys
from clients.errors import OutOfMemory
from clients.testing import Accept, Emit, Fail, Hang, Progress, Script
from http_facade.edge import EdgeConfig
from tests.facade_harness import (
    CHAT,
    COMPLETIONS,
    Harness,
    chat,
    completion,
    facade_and_fake,
    prompt_ids,
)

SECRET = "very-secret-key"
KEY = {"authorization": f"Bearer {SECRET}"}


def edge(form: str, *, log_prompts: bool = False) -> EdgeConfig:
    return EdgeConfig(api_keys=plain_keys([SECRET]), access_log=form, log_prompts=log_prompts)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [it.getMessage() for it in caplog.records if it.name == "http_facade.access"]


async def line_of(caplog: pytest.LogCaptureFixture, request_id: str) -> str:
    """The one line of it; a client that left is noticed a moment later."""
    deadline = time.monotonic() + 20
    while not (found := [it for it in lines(caplog) if request_id in it]):
        assert time.monotonic() < deadline, f"no line of {request_id}"
        await asyncio.sleep(0.02)
    (line,) = found
    return line


async def requests_of_all_ends(facade: Harness) -> list[int]:
    """Finished, streamed, refused, failed in the stream, left; returns the first prompt."""
    facade.say("an answer to hide")
    body = completion(prompt="a prompt to hide")
    await facade.post(COMPLETIONS, body, {**KEY, "x-request-id": "whole"})
    await facade.stream(COMPLETIONS, body, {**KEY, "x-request-id": "streamed"})
    await facade.post(CHAT, chat(n=0), {**KEY, "x-request-id": "refused"})
    await facade.post(CHAT + "?q=hide", chat(), {"x-api-key": "nope", "x-request-id": "keyless"})
    prompt = prompt_ids(facade.fake.requests[0].prompt)
    facade.fake.script(Script((Accept(), Progress(), Emit([504]), Fail(OutOfMemory("none")))))
    await facade.stream(CHAT, chat(), {**KEY, "x-request-id": "failed"})
    facade.fake.script(Script((Accept(), Progress(), Emit([504]), Hang())))
    leaving = asyncio.create_task(facade.stream(CHAT, chat(), {**KEY, "x-request-id": "left"}))
    await facade.fake.wait_for_calls(4)
    await asyncio.sleep(0.1)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    return prompt


async def test_json(embedded_model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with facade_and_fake(embedded_model_dir, edge=edge("json")) as facade:
        prompt = await requests_of_all_ends(facade)
        ends: dict[str, dict[str, Any]] = {
            name: json.loads(await line_of(caplog, name))
            for name in ("whole", "streamed", "refused", "keyless", "failed", "left")
        }
    whole = ends["whole"]
    assert whole["event"] == "request" and whole["time"].endswith("Z")
    assert (whole["key"], whole["tenant"]) == ("api-key", plain_keys([SECRET])[0].tenant)
    assert (whole["method"], whole["path"], whole["route"]) == ("POST", COMPLETIONS, COMPLETIONS)
    assert (whole["status"], whole["finish"], whole["model"]) == (200, "stop", "fake")
    assert whole["prompt_tokens"] == len(prompt) and whole["completion_tokens"] > 2
    assert whole["ms"] > 0 and "error" not in whole and "ttft_ms" not in whole
    assert 0 < ends["streamed"]["ttft_ms"] <= ends["streamed"]["ms"]
    assert (ends["refused"]["status"], ends["refused"]["error"]) == (400, "invalid_value")
    assert (ends["keyless"]["status"], ends["keyless"]["error"]) == (401, "invalid_api_key")
    assert "key" not in ends["keyless"] and "q=" not in ends["keyless"]["path"]
    assert (ends["failed"]["status"], ends["failed"]["error"]) == (200, "out_of_memory")
    assert (ends["left"]["status"], ends["left"]["error"]) == (499, "client_gone")
    assert ends["left"]["completion_tokens"] == 1
    everything = "\n".join(lines(caplog))
    for secret in (SECRET, "to hide", "nope"):
        assert secret not in everything


async def test_text(embedded_model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with facade_and_fake(embedded_model_dir, edge=edge("text")) as facade:
        await requests_of_all_ends(facade)
        line = await line_of(caplog, "whole")
        assert line.startswith("id=whole key=api-key tenant=")
        for part in (f" path={COMPLETIONS} ", " status=200 ", " finish=stop"):
            assert part in line
        assert " status=499 " in await line_of(caplog, "left")
        # nothing a caller sends breaks a line, or looks like a field of its own
        await facade.get("/no/such/%0Astatus=200%20error=none")
        (odd,) = [it for it in lines(caplog) if "/no/such" in it]
        assert "\n" not in odd and odd.count(" status=") == 1 and " route=unmatched " in odd
        # what is no HTTP at all has a line, too
        reader, writer = await asyncio.open_connection("127.0.0.1", facade.running.port)
        writer.write(b"nonsense\r\n\r\n")
        await reader.read()
        writer.close()
        assert lines(caplog)[-1].endswith("status=400 error=invalid_http")


async def test_off(embedded_model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with facade_and_fake(embedded_model_dir, edge=edge("off")) as facade:
        facade.say("fine")
        await facade.post(CHAT, chat(), KEY)
        assert lines(caplog) == []


async def test_prompts_only_where_they_are_asked_for(
    embedded_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for form in ("json", "text"):
        caplog.clear()
        async with facade_and_fake(embedded_model_dir, edge=edge(form, log_prompts=True)) as facade:
            facade.say("an answer to hide")
            messages = [{"role": "user", "content": 'a "prompt"\nto show'}]
            await facade.post(CHAT, chat(messages=messages), {**KEY, "x-request-id": "shown"})
            line = await line_of(caplog, "shown")
        said = (
            json.loads(line)["prompt"] if form == "json" else json.loads(line.split("prompt=")[-1])
        )
        assert said == messages
        assert "\n" not in line and "an answer to hide" not in line
