"""Several engines behind one facade: one refuses, dies or freezes, and requests go elsewhere."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from clients.errors import EngineUnavailable, QueueFull
from clients.testing import (
    Accept,
    Emit,
    Fail,
    Hang,
    Pause,
    Progress,
    Script,
)
from clients.testing.fake_engine import default_script
from tests.facade_harness import (
    CHAT,
    COMPLETIONS,
    chat,
    check_envelope,
    completion,
    text_of,
)
from tests.pool_harness import NUM_PROMPTS, ask, facade_and_fakes, home_of, prompt

FULL = Script.failing(QueueFull("the queue is full", retry_after_seconds=7))
FULLER = Script.failing(QueueFull("the queue is full", retry_after_seconds=3))
GONE = Script.failing(EngineUnavailable("draining"))


# ---------------------------------------------------------------- refused before Accepted


async def test_a_full_engines_request_goes_to_the_other_at_once(embedded_model_dir: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with facade_and_fakes(embedded_model_dir, tracer_provider=provider) as pool:
        home, other = await home_of(pool, prompt=prompt(1))
        exporter.clear()
        home.script(FULL)
        began = time.monotonic()
        for stream in (False, True):
            body = completion(prompt=prompt(1))
            if stream:
                answer = await pool.facade.stream(COMPLETIONS, body)
                assert answer.text() == "found" and answer.num_done == 1
            else:
                assert text_of((await ask(pool, prompt=prompt(1)))[1]) == "found"
        assert time.monotonic() - began < 6  # no hint was waited for
        assert len(home.calls) == 2 and len(other.calls) == 2
        first, second = home.calls[0].request.request_id, other.calls[0].request.request_id
        assert second == first + "-r2"
        assert await pool.metric('firsttoken_reroutes_total{reason="queue_full"}') == 2
        span = next(s for s in exporter.get_finished_spans() if s.name.startswith("POST"))
        (event,) = (e for e in span.events if e.name == "rerouted")
        host, _, port = home.target.rpartition(":")
        assert dict(event.attributes or {}) == {
            "firsttoken.reroute.reason": "queue_full",
            "server.address": host,
            "server.port": int(port),
        }


async def test_when_all_are_full_the_smallest_hint_goes_to_the_client(
    embedded_model_dir: Path,
) -> None:
    async with facade_and_fakes(embedded_model_dir) as pool:
        for scripts in ((FULL, FULLER), (FULLER, FULL)):
            for fake, script in zip(pool.fakes, scripts, strict=True):
                fake.calls.clear()
                fake.script(script)
            for path, body in ((CHAT, chat(stream=True)), (COMPLETIONS, completion())):
                status, answer, headers = await pool.facade.post(path, body)
                assert check_envelope(status, answer, 429)["code"] == "queue_full"
                assert headers["Retry-After"] == "3"
            assert pool.num_calls() == [2, 2]
        pool.fakes[0].script(GONE)
        pool.fakes[1].script(FULL)
        status, answer, headers = await pool.facade.post(COMPLETIONS, completion())
        assert check_envelope(status, answer, 429)["code"] == "queue_full"
        assert headers["Retry-After"] == "7"


async def test_what_no_engine_could_hold_is_asked_of_one_only(embedded_model_dir: Path) -> None:
    async with facade_and_fakes(embedded_model_dir) as pool:
        for fake in pool.fakes:
            fake.script(Script.failing(QueueFull("it never fits")))
        status, body = await ask(pool)
        check_envelope(status, body, 429)
        assert sum(pool.num_calls()) == 1


async def test_an_engine_out_of_reach_costs_a_request_nothing(embedded_model_dir: Path) -> None:
    async with facade_and_fakes(embedded_model_dir) as pool:
        home, other = await home_of(pool, prompt=prompt(1))
        home.script(GONE)
        assert text_of((await ask(pool, prompt=prompt(1)))[1]) == "found"
        assert len(other.calls) == 1
        assert await pool.metric('firsttoken_reroutes_total{reason="unavailable"}') == 1
        # all of them: tried again after a short pause, and then told
        other.script(GONE)
        for fake in pool.fakes:
            fake.calls.clear()
        status, body = await ask(pool, prompt=prompt(1))
        check_envelope(status, body, 503)
        assert pool.num_calls() == [3, 3]
        ids = {call.request.request_id for fake in pool.fakes for call in fake.calls}
        assert len(ids) == 6
        home.script(GONE, default_script)
        assert (await ask(pool, prompt=prompt(1)))[0] == 200


async def test_each_prompt_of_a_list_finds_its_own_engine(embedded_model_dir: Path) -> None:
    async with facade_and_fakes(embedded_model_dir) as pool:
        pool.fakes[0].script(FULL)
        prompts = [prompt(number) for number in range(NUM_PROMPTS)]
        status, body = await ask(pool, prompt=prompts, n=2)
        assert status == 200 and len(body["choices"]) == 2 * NUM_PROMPTS
        assert len(pool.fakes[1].calls) == NUM_PROMPTS
        assert 1 <= len(pool.fakes[0].calls) < NUM_PROMPTS


async def test_nothing_is_tried_again_once_it_was_accepted(embedded_model_dir: Path) -> None:
    async with facade_and_fakes(embedded_model_dir) as pool:
        home, other = await home_of(pool, prompt=prompt(1))
        for error, expected in (
            (EngineUnavailable("the engine core died"), 503),
            (QueueFull("the queue is full", retry_after_seconds=1), 429),
        ):
            home.script(Script((Accept(), Fail(error))))
            status, body = await ask(pool, prompt=prompt(1))
            check_envelope(status, body, expected)
            home.script(Script((Accept(), Progress(), Emit([504]), Fail(error))))
            answer = await pool.facade.stream(COMPLETIONS, completion(prompt=prompt(1)))
            assert answer.finish_reasons() == [] and "error" in answer.events[-1]
        assert len(home.calls) == 4 and other.calls == []


async def test_all_attempts_share_the_requests_deadline(embedded_model_dir: Path) -> None:
    async with facade_and_fakes(embedded_model_dir) as pool:
        home, other = await home_of(pool, prompt=prompt(1))
        home.script(Script((Pause(1.5), Fail(EngineUnavailable("draining")))))
        other.script(Script((Hang(),)))
        body = completion(prompt=prompt(1))
        began = time.monotonic()
        status, answer, _ = await pool.facade.post(COMPLETIONS, body, {"x-request-timeout": "4"})
        assert check_envelope(status, answer, 504)["code"] == "deadline_exceeded"
        assert 3.9 < time.monotonic() - began < 20
        left = other.calls[0].timeout_seconds
        assert left is not None and left < 2.65


# ---------------------------------------------------------------- engines that die or freeze


async def test_a_dead_engine_is_left_at_once_and_rejoined(embedded_model_dir: Path) -> None:
    async with facade_and_fakes(embedded_model_dir) as pool:
        home, other = await home_of(pool, prompt=prompt(1))
        home.script(Script((Accept(), Progress(), Emit([504]), Hang())))
        begun = asyncio.create_task(pool.facade.stream(COMPLETIONS, completion(prompt=prompt(1))))
        await home.wait_for_calls(1)
        await asyncio.sleep(0.5)
        await home.kill()
        assert (await begun).events[-1]["error"]["code"] == "engine_unavailable"
        for _ in range(5):
            assert text_of((await ask(pool, prompt=prompt(1)))[1]) == "found"
        assert len(other.calls) == 5
        assert await pool.metric(f'firsttoken_engine_ready{{engine="{home.target}"}}') == 0
        pool.say("found")
        await home.start()
        await pool.wait_readiness(True, True)
        home.calls.clear()
        assert (await ask(pool, prompt=prompt(1)))[0] == 200
        assert len(home.calls) == 1  # its keys come home
        assert await pool.metric(f'firsttoken_engine_ready{{engine="{home.target}"}}') == 1


async def test_a_frozen_engines_unaccepted_requests_go_elsewhere_within_5_s(
    embedded_model_dir: Path,
) -> None:
    async with facade_and_fakes(embedded_model_dir) as pool:
        home, other = await home_of(pool, prompt=prompt(1))
        home.freeze()
        began = time.monotonic()
        waiting = [asyncio.create_task(ask(pool, prompt=prompt(1))) for _ in range(4)]
        for status, body in await asyncio.gather(*waiting):
            assert (status, text_of(body)) == (200, "found")
        assert 3 < time.monotonic() - began < 10  # with what a busy machine adds
        assert len(other.calls) == 4 and pool.readiness().count(True) == 1
        began = time.monotonic()
        assert (await ask(pool, prompt=prompt(1)))[0] == 200
        assert time.monotonic() - began < 3  # it is known by now
        home.thaw()
        await pool.wait_readiness(True, True)
        home.calls.clear()
        assert (await ask(pool, prompt=prompt(1)))[0] == 200
        assert len(home.calls) == 1
