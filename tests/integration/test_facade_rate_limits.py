"""Limits of a key through the facade: refusals with true hints, and the headers that tell ahead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from access.limits import KeyLimits
from clients.errors import EngineUnavailable, QueueFull
from clients.testing import Accept, Emit, Fail, Hang, Progress, Script
from http_facade.edge import EdgeConfig
from tests.facade_harness import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Harness,
    body_for,
    chat,
    check_envelope,
    completion,
    facade_and_fake,
    text_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

FILE = """
keys:
  - {id: requests, key: k-requests, requests_per_minute: 120}
  - {id: requests2, key: k-requests2, requests_per_minute: 60}
  - {id: tokens, key: k-tokens, tokens_per_minute: 6000}
  - {id: tokens2, key: k-tokens2, tokens_per_minute: 6000}
  - {id: tokens3, key: k-tokens3, tokens_per_minute: 6000}
  - {id: tokens4, key: k-tokens4, tokens_per_minute: 6000}
  - {id: tokens5, key: k-tokens5, tokens_per_minute: 6000}
  - {id: places, key: k-places, max_concurrent_requests: 2}
  - {id: free, key: k-free}
"""


class Clock:
    """The limits' clock. It stands still but while it is told to run."""

    def __init__(self) -> None:
        self._now_seconds = 1000.0
        self._runs_since: float | None = None

    def __call__(self) -> float:
        ran = 0.0 if self._runs_since is None else time.monotonic() - self._runs_since
        return self._now_seconds + ran

    def advance(self, seconds: float) -> None:
        self._now_seconds += seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        self._runs_since = time.monotonic()
        yield
        self._now_seconds, self._runs_since = self(), None


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer k-{name}"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(
    embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory, clock: Clock
) -> AsyncIterator[Harness]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(FILE)
    edge = EdgeConfig(api_keys_file=path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("http_facade.keys.KeyLimits", partial(KeyLimits, clock))
        async with facade_and_fake(embedded_model_dir, edge=edge) as harness:
            yield harness


@pytest.fixture
def facade(shared: Harness) -> Harness:
    shared.reset()
    shared.say("fine")
    return shared


def check_refusal(answer: tuple[int, dict[str, Any], Mapping[str, str]], what: str) -> float:
    """Returns the hint in seconds."""
    status, body, headers = answer
    error = check_envelope(status, body, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert what in error["message"]
    assert headers["x-should-retry"] == "true"
    millis = int(headers["retry-after-ms"])
    assert int(headers["Retry-After"]) == -(-millis // 1000)
    return millis / 1000


async def spend_requests(facade: Harness, name: str, path: str) -> float:
    """Until the key's minute is used; returns the hint."""
    for _ in range(200):
        answer = await facade.post(path, body_for(path, stream=False), bearer(name))
        if answer[0] != 200:
            return check_refusal(answer, "requests of the minute")
    raise AssertionError("never refused")


async def test_requests_of_a_minute(facade: Harness, clock: Clock) -> None:
    hint = await spend_requests(facade, "requests", CHAT)
    assert 0 < hint <= 0.5
    _, raw, _ = await facade.get("/readyz")
    assert raw
    clock.advance(hint)
    status, _, headers = await facade.post(CHAT, chat(), bearer("requests"))
    assert status == 200
    assert headers["x-ratelimit-limit-requests"] == "120"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"] in {"1m0s", *(f"59.{i:g}s" for i in range(1000))}
    assert "x-ratelimit-limit-tokens" not in headers
    # others are not touched, and what only reads is not counted
    status, _, headers = await facade.post(CHAT, chat(), bearer("free"))
    assert status == 200 and not [name for name in headers if "ratelimit" in name.lower()]


async def test_refused_before_the_engine_hears_of_it(facade: Harness) -> None:
    await spend_requests(facade, "requests2", COMPLETIONS)
    facade.fake.calls.clear()
    for path in (CHAT, COMPLETIONS):
        for stream in (False, True):
            answer = await facade.post(path, body_for(path, stream=stream), bearer("requests2"))
            check_refusal(answer, "requests of the minute")
            assert answer[2]["content-type"].startswith("application/json")  # no SSE was opened
            assert answer[2]["x-ratelimit-limit-requests"] == "60"
            assert answer[2]["x-ratelimit-remaining-requests"] == "0"
    assert facade.fake.calls == []


async def test_tokens_of_a_minute_are_reserved_and_given_back(facade: Harness) -> None:
    ids = facade.say("one two three")
    body = completion(prompt=[5] * 100, max_tokens=5000)
    status, answer, headers = await facade.post(COMPLETIONS, body, bearer("tokens"))
    assert status == 200 and text_of(answer) == "one two three"
    assert headers["x-ratelimit-limit-tokens"] == "6000"
    assert 5896 <= int(headers["x-ratelimit-remaining-tokens"]) <= 6000
    # of 5,100 it used 104: a second one of that size fits at once, and a third one
    for _ in range(2):
        status, _, headers = await facade.post(COMPLETIONS, body, bearer("tokens"))
        assert status == 200
    facade.fake.script(Script((Accept(), Progress(), Emit([504]), Hang())))
    running = asyncio.create_task(facade.stream(COMPLETIONS, body, bearer("tokens")))
    await facade.fake.wait_for_calls(4)
    hint = check_refusal(
        await facade.post(COMPLETIONS, body, bearer("tokens")), "the request needs 5100"
    )
    assert 35 < hint < 48  # about 4,400 tokens, at 100 a second
    running.cancel()  # it leaves, and gives back what it did not use
    await asyncio.gather(running, return_exceptions=True)
    await facade.fake.calls[3].wait_closed()
    facade.say("one two three")
    deadline = time.monotonic() + 20
    while (await facade.post(COMPLETIONS, body, bearer("tokens")))[0] != 200:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert len(ids) == 3


async def test_every_sample_and_prompt_is_reserved(facade: Harness) -> None:
    body = completion(prompt=[[5] * 10, [6] * 20], max_tokens=100, n=3)
    facade.fake.script(Script.of_samples([[5, 2]] * 3, stop_token_id=None))
    _, answer, headers = await facade.post(COMPLETIONS, body, bearer("tokens2"))
    assert len(answer["choices"]) == 6, answer
    assert int(headers["x-ratelimit-remaining-tokens"]) <= 6000 - 36 + 50  # prompts and answers
    large = completion(prompt=[5] * 10, max_tokens=1500, n=5)
    check_refusal(
        await facade.post(COMPLETIONS, large, bearer("tokens2")), "the request needs 7510"
    )


async def test_what_the_engine_refused_costs_no_tokens(facade: Harness) -> None:
    facade.fake.script(Script.failing(QueueFull("full", reason="QUEUE_FULL")))
    body = completion(prompt=[5] * 1000, max_tokens=4000)
    for _ in range(3):
        status, answer, _ = await facade.post(COMPLETIONS, body, bearer("tokens3"))
        assert check_envelope(status, answer, 429)["code"] == "queue_full"
    facade.say("fine")
    _, _, headers = await facade.post(
        COMPLETIONS, completion(prompt=[5], max_tokens=1), bearer("tokens3")
    )
    assert int(headers["x-ratelimit-remaining-tokens"]) >= 5997


async def remaining_tokens(facade: Harness, name: str) -> int:
    facade.say("fine")
    tiny = completion(prompt=[5], max_tokens=1)
    _, _, headers = await facade.post(COMPLETIONS, tiny, bearer(name))
    return int(headers["x-ratelimit-remaining-tokens"])


async def test_what_the_engine_failed_costs_no_tokens_either(facade: Harness) -> None:
    dies = Fail(EngineUnavailable("it died", reason="ENGINE_UNAVAILABLE"))
    facade.fake.script(Script((Accept(), Progress(), Emit([504] * 50), dies)))
    body = completion(prompt=[5] * 1000, max_tokens=4000)
    for _ in range(2):
        status, answer, _ = await facade.post(COMPLETIONS, body, bearer("tokens4"))
        check_envelope(status, answer, 503)
    assert await remaining_tokens(facade, "tokens4") >= 5997


async def test_a_deadline_of_the_callers_own_costs_what_was_computed(facade: Harness) -> None:
    """Else the limit could be got round by it: large prompts, and never an answer."""
    body = completion(prompt=[5] * 1000, max_tokens=800)
    soon = {**bearer("tokens5"), "x-request-timeout": "3"}
    facade.fake.script(Script((Hang(),)))  # in the queue, as it were
    status, answer, _ = await facade.post(COMPLETIONS, body, soon)
    check_envelope(status, answer, 504)
    assert await remaining_tokens(facade, "tokens5") >= 5997
    facade.fake.script(Script((Accept(), Progress(), Emit([504] * 50), Hang())))
    posts = (facade.post(COMPLETIONS, body, soon) for _ in range(3))
    for status, answer, _ in await asyncio.gather(*posts):
        check_envelope(status, answer, 504)
    assert 2840 <= await remaining_tokens(facade, "tokens5") <= 2850  # 3,150 are used


async def test_requests_at_once_and_their_place_after_a_client_left(facade: Harness) -> None:
    facade.fake.script(Script((Accept(), Progress(), Emit([504]), Hang())))
    clients = [await facade_socket(facade) for _ in range(2)]
    await facade.fake.wait_for_calls(2)
    answer = await facade.post(CHAT, chat(), bearer("places"))
    assert check_refusal(answer, "2 requests running") >= 0.5
    clients[0].close()
    await facade.fake.calls[0].wait_closed()
    facade.say("fine")
    deadline = time.monotonic() + 20
    while (await facade.post(CHAT, chat(), bearer("places")))[0] != 200:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    clients[1].close()


async def facade_socket(facade: Harness) -> asyncio.StreamWriter:
    reader, writer = await asyncio.open_connection("127.0.0.1", facade.running.port)
    data = b'{"model": "fake", "prompt": [5], "stream": true}'
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"x-api-key: k-places\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    await reader.readuntil(b"data: ")
    return writer


async def test_the_official_client_waits_as_told_and_succeeds(
    facade: Harness, clock: Clock
) -> None:
    await spend_requests(facade, "requests", CHAT)
    facade.fake.calls.clear()
    client = openai.AsyncOpenAI(base_url=facade.url + "/v1", api_key="k-requests", max_retries=1)
    async with client:
        with clock.running():
            answer = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}]
            )
        assert answer.choices[0].message.content == "fine"
    assert len(facade.fake.calls) == 1
    async with openai.AsyncOpenAI(
        base_url=facade.url + "/v1", api_key="k-requests", max_retries=0
    ) as client:
        await spend_requests(facade, "requests", CHAT)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}]
            )
        assert caught.value.code == "rate_limit_exceeded"
