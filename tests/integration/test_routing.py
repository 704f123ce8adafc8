"""Several engines behind one facade: which one serves."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from clients.testing import (
    Accept,
    Emit,
    FakeEngine,
    Finish,
    Pause,
    Progress,
    Script,
)
from http_facade.engine_address import EngineAddress, parse_engine
from tests.facade_harness import (
    CHAT,
    COMPLETIONS,
    MODEL,
    chat,
    check_envelope,
    completion,
)
from tests.pool_harness import NUM_PROMPTS, Pool, ask, facade_and_fakes, home_of, prompt


async def models_of(pool: Pool) -> list[str]:
    _, raw, _ = await pool.facade.get("/v1/models")
    return [model["id"] for model in json.loads(raw)["data"]]


# ---------------------------------------------------------------- which engine


async def test_equal_prefixes_meet_at_one_engine_and_different_ones_spread(
    embedded_model_dir: Path,
) -> None:
    async with facade_and_fakes(embedded_model_dir) as pool:
        pool.say("fine")
        assert await models_of(pool) == [MODEL]
        for number in range(NUM_PROMPTS):
            for question in range(3):
                ids = [*prompt(number), *[question] * (10 + question)]
                assert (await ask(pool, prompt=ids))[0] == 200
        homes = [{call.request.prompt[0] for call in fake.calls} for fake in pool.fakes]
        assert not homes[0] & homes[1]
        assert min(map(len, homes)) >= 2
        assert (
            await pool.metric('firsttoken_prefix_affinity_total{outcome="hit"}') == 3 * NUM_PROMPTS
        )
        served = [
            await pool.metric(f'firsttoken_engine_requests_total{{engine="{fake.target}"}}')
            for fake in pool.fakes
        ]
        assert served == pool.num_calls() and sum(served) == 3 * NUM_PROMPTS


async def test_prompt_cache_key_takes_the_place_of_the_prefix(embedded_model_dir: Path) -> None:
    async with facade_and_fakes(embedded_model_dir) as pool:
        pool.say("fine")
        for number in range(NUM_PROMPTS):
            body = completion(prompt=prompt(number), prompt_cache_key="one session")
            status, _, headers = await pool.facade.post(COMPLETIONS, body)
            assert status == 200 and "x-ignored-params" not in headers
        assert sorted(pool.num_calls()) == [0, NUM_PROMPTS]
        for number in range(NUM_PROMPTS):
            await ask(pool, prompt=prompt(0), prompt_cache_key=str(number))
        assert min(pool.num_calls()) >= 2
        status, body = await ask(pool, prompt_cache_key="x" * 513)
        check_envelope(status, body, 400, "prompt_cache_key")


@pytest.mark.parametrize("policy", ["round-robin", "least-loaded"])
async def test_other_policies_look_at_no_prefix(embedded_model_dir: Path, policy: str) -> None:
    async with facade_and_fakes(embedded_model_dir, routing_policy=policy) as pool:
        pool.say("fine")
        for _ in range(10):
            await ask(pool, prompt=prompt(1))
        assert pool.num_calls() == [5, 5]


async def test_an_overloaded_engine_is_passed_over(embedded_model_dir: Path) -> None:
    async with facade_and_fakes(embedded_model_dir) as pool:
        home, other = await home_of(pool, prompt=prompt(1))
        home.load = dataclasses.replace(home.load, num_running=60, num_waiting=9)
        await home.set_serving(True)
        engines = pool.facade.running.facade.engines.engines
        (engine,) = [engine for engine in engines if engine.target == home.target]
        deadline = time.monotonic() + 20
        while engine.load < 69:
            assert time.monotonic() < deadline, "its report did not come"
            await asyncio.sleep(0.02)
        for _ in range(3):
            assert (await ask(pool, prompt=prompt(1)))[0] == 200
        assert len(home.calls) == 0 and len(other.calls) == 3
        assert await pool.metric('firsttoken_prefix_affinity_total{outcome="passed_over"}') == 3


async def test_our_own_calls_count_before_the_engine_reports_them(
    embedded_model_dir: Path,
) -> None:
    async with facade_and_fakes(embedded_model_dir) as pool:
        home, other = await home_of(pool, prompt=prompt(1))
        ends = [Finish(index=i) for i in range(4)]
        for fake in pool.fakes:
            fake.script(Script((Accept(), Progress(), Emit([504]), Pause(2.5), *ends)))
        began = time.monotonic()
        asked = [asyncio.create_task(ask(pool, prompt=prompt(1), n=4)) for _ in range(6)]
        while sum(pool.num_calls()) < 6:
            assert time.monotonic() - began < 20
            await asyncio.sleep(0.01)
        # an eighth of 64 samples is two calls of four; from then on the mean decides
        assert len(home.calls) >= 2 and len(other.calls) >= 2
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 6


# ---------------------------------------------------------------- several models


async def test_models_by_name_and_the_aliases_of_the_first(embedded_model_dir: Path) -> None:
    def named(fakes: Sequence[FakeEngine]) -> list[EngineAddress]:
        texts = [f"chat={fakes[0].target}", fakes[1].target, f"chat={fakes[2].target}"]
        return [parse_engine(text) for text in texts]

    async with facade_and_fakes(
        embedded_model_dir, "a", "b", "a2", addresses=named, served_model_names=("gpt",)
    ) as pool:
        pool.say("fine")
        assert await models_of(pool) == ["chat", "b", "gpt"]
        for name in ("chat", "b", "gpt"):
            status, raw, _ = await pool.facade.get(f"/v1/models/{name}")
            assert status == 200 and json.loads(raw)["id"] == name
            for number in range(NUM_PROMPTS):
                status, body = await ask(pool, model=name, prompt=prompt(number))
                assert (status, body["model"]) == (200, name)
        assert len(pool.fakes[1].calls) == NUM_PROMPTS
        # and no other's: each call has its engine's own name
        assert [{call.request.model for call in fake.calls} for fake in pool.fakes] == [
            {"a"},
            {"b"},
            {"a2"},
        ]
        for name in ("a", "a2", "nope"):
            status, body = await ask(pool, model=name)
            check_envelope(status, body, 404, "model")


async def test_one_models_engines_gone_leave_the_others_served(embedded_model_dir: Path) -> None:
    async with facade_and_fakes(embedded_model_dir, "a", "b") as pool:
        pool.say("fine")
        await pool.fakes[0].kill()
        await pool.wait_readiness(False, True)
        assert (await pool.facade.get("/readyz"))[0] == 200
        assert await models_of(pool) == ["a", "b"]  # what is known stays known
        status, body = await ask(pool, model="a")
        assert check_envelope(status, body, 503)["code"] == "engine_unavailable"
        assert (await ask(pool, model="b"))[0] == 200
        await pool.fakes[1].kill()
        await pool.wait_readiness(False, False)
        assert (await pool.facade.get("/readyz"))[0] == 503


async def test_a_model_that_may_yet_come_is_503_and_one_that_can_not_is_404(
    embedded_model_dir: Path,
) -> None:
    def with_absent(fakes: Sequence[FakeEngine]) -> list[EngineAddress]:
        return [parse_engine(fakes[0].target), parse_engine("later=127.0.0.1:1")]

    async with facade_and_fakes(embedded_model_dir, "a", addresses=with_absent, wait=False) as pool:
        await pool.wait_readiness(True, False)
        for model, expected in (("later", 503), ("never", 404)):
            status, body = await ask(pool, model=model)
            check_envelope(status, body, expected)
            assert (await pool.facade.get(f"/v1/models/{model}"))[0] == expected


# ---------------------------------------------------------------- tokenizers that differ


async def test_requests_keep_to_the_engines_of_one_tokenizer(
    embedded_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with facade_and_fakes(embedded_model_dir, MODEL, MODEL, MODEL) as pool:
        odd = pool.fakes[0]
        await odd.kill()
        await pool.wait_readiness(False, True, True)
        files = {**odd.tokenizer.files, "chat_template.jinja": b"{{ messages[0].content }}!"}
        odd.set_tokenizer(dataclasses.replace(odd.tokenizer, digest="odd", files=files))
        await odd.start()
        await pool.wait_readiness(True, True, True)
        assert "different tokenizers" in caplog.text
        pool.say("fine")
        for number in range(NUM_PROMPTS):
            assert (await ask(pool, prompt=prompt(number)))[0] == 200
        assert odd.calls == [] and min(pool.num_calls()[1:]) >= 1
        # the others change, too: as in a rollout, each is found out by its own refusal
        for fake in pool.fakes[1:]:
            fake.set_tokenizer(odd.tokenizer)
        for number in range(NUM_PROMPTS):
            status, _, _ = await pool.facade.post(CHAT, chat(prompt_cache_key=str(number)))
            assert status == 200
        digests = {c.request.tokenizer_digest for f in pool.fakes for c in f.calls[-3:]}
        assert "odd" in digests and min(pool.num_calls()) >= 1


async def test_one_fingerprint_stands_for_all_engines_that_may_answer(
    embedded_model_dir: Path,
) -> None:
    async with facade_and_fakes(embedded_model_dir) as pool:
        pool.say("fine")
        (alike,) = await fingerprints(pool)
        other = pool.fakes[1]
        await other.kill()
        await pool.wait_readiness(True, False)
        assert await fingerprints(pool) == {alike}
        other.server_info = dataclasses.replace(other.server_info, device="another")
        await other.start()
        await pool.wait_readiness(True, True)
        (joint,) = await fingerprints(pool)
        assert joint != alike and min(pool.num_calls()) > 0


async def fingerprints(pool: Pool) -> set[str]:
    answers = [await ask(pool, prompt=prompt(number)) for number in range(NUM_PROMPTS)]
    return {body["system_fingerprint"] for _, body in answers}


async def test_an_engine_that_cannot_be_asked_is_told_in_the_log_once(
    embedded_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def guarded(fakes: Sequence[FakeEngine]) -> list[EngineAddress]:
        fakes[1].token = "secret"
        return [parse_engine(fake.target) for fake in fakes]

    async with facade_and_fakes(
        embedded_model_dir, "a", "b", addresses=guarded, wait=False
    ) as pool:
        await pool.wait_readiness(True, False)
        await asyncio.sleep(1.5)
        line = f"engine {pool.fakes[1].target} is not there: no or wrong token"
        assert caplog.text.count(line) == 1
