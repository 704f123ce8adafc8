"""What /metrics says stays true when requests are aborted: in the queue, and after some tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from clients.testing import Accept, Emit, Finish, Hang, Pause, Progress, Script
from tests.facade_harness import CHAT, MODEL, Harness, chat, facade_and_fake

TTFT = "gen_ai_server_time_to_first_token_seconds"
TPOT = "gen_ai_server_time_per_output_token_seconds"
DURATION = "gen_ai_server_request_duration_seconds"
OF_CHAT = {"gen_ai_operation_name": "chat", "gen_ai_request_model": MODEL}


@pytest_asyncio.fixture
async def facade(embedded_model_dir: Path) -> AsyncIterator[Harness]:
    async with facade_and_fake(embedded_model_dir) as harness:
        yield harness


async def value(facade: Harness, name: str, **labels: str) -> float:
    """0 where there is no such sample yet."""
    text = (await facade.get("/metrics"))[1].decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return 0.0


async def until(facade: Harness, name: str, expected: float) -> None:
    """Of chats."""
    deadline = time.monotonic() + 20
    while await value(facade, name, http_route=CHAT) != expected:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_request_aborted_in_the_queue_has_a_duration_and_no_first_token(
    facade: Harness,
) -> None:
    facade.fake.script(Script((Accept(), Hang())))
    _, writer = await facade.send_raw(CHAT, chat(stream=True))
    await until(facade, "http_server_active_requests", 1)
    writer.close()
    await until(facade, "http_server_active_requests", 0)
    assert await value(facade, f"{TTFT}_count", **OF_CHAT) == 0
    assert await value(facade, f"{DURATION}_count", **OF_CHAT, error_type="client_gone") == 1
    answers = {"http_route": CHAT, "http_response_status_code": "499"}
    assert await value(facade, "http_server_answers_total", **answers) == 1


async def test_a_stream_aborted_between_tokens_had_its_first_one(facade: Harness) -> None:
    facade.fake.script(Script((Accept(), Progress(), Emit((504,)), Emit((504,)), Hang())))
    reader, writer = await facade.send_raw(CHAT, chat(stream=True))
    for _ in range(3):  # the role's empty one, and two tokens
        await reader.readuntil(b'"content":')
    writer.close()
    await until(facade, "http_server_active_requests", 0)
    assert await value(facade, f"{TTFT}_count", **OF_CHAT) == 1
    assert await value(facade, f"{TPOT}_count", **OF_CHAT) == 0  # it never came to its end


async def test_a_thought_is_what_the_first_token_may_belong_to(embedded_model_dir: Path) -> None:
    async with facade_and_fake(embedded_model_dir, reasoning_parser="qwen3") as facade:
        thought = facade.tok.encode("<think>Well")
        answer = facade.tok.encode("</think>Yes")
        steps = (Accept(), Progress(), Emit(thought), Pause(0.4), Emit(answer), Finish())
        facade.fake.script(Script(steps))
        streamed = await facade.stream(CHAT, chat())
        assert streamed.text() == "Yes"
        assert await value(facade, f"{TTFT}_sum", **OF_CHAT) < 0.4


async def test_time_per_token_is_that_of_one_choice(facade: Harness) -> None:
    """Two choices of three tokens each, written at the same time: two gaps, not five."""
    token_ids = facade.tok.encode("a b c")
    facade.fake.script(Script.of_samples((token_ids, token_ids), delay_seconds=0.1))
    await facade.stream(CHAT, chat(n=2))
    assert await value(facade, f"{TPOT}_count", **OF_CHAT) == 1
    assert await value(facade, f"{TPOT}_sum", **OF_CHAT) >= 0.095
