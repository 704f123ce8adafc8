"""Who may call the facade, what a key opens, and that the keys file is followed."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp
import openai
import pytest
import pytest_asyncio

from access.keys import admin_key, digest_of, plain_keys
from http_facade.edge import EdgeConfig
from http_facade.keys import ADMIN_ROUTES, PROBES
from tests.facade_harness import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Harness,
    body_for,
    chat,
    check_envelope,
    facade_and_fake,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLAIN, OPERATOR, LOW = "plain-key", "operator-key", "low-key"
FILE = f"""
keys:
  - {{id: low, key: {LOW}, tenant: batch, priority: {{min: 2, max: 5}}}}
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def basic(key: str, user: str = "anyone") -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"{user}:{key}".encode()).decode()}


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(FILE)
    return path


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(embedded_model_dir: Path, keys_file: Path) -> AsyncIterator[Harness]:
    edge = EdgeConfig(
        api_keys=plain_keys([PLAIN]),
        api_keys_file=keys_file,
        admin_key=admin_key(digest_of(OPERATOR)),
    )
    async with facade_and_fake(embedded_model_dir, edge=edge) as harness:
        yield harness


@pytest.fixture
def facade(shared: Harness, keys_file: Path) -> Harness:
    shared.reset()
    shared.say("fine")
    return shared


async def get(
    facade: Harness, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
) -> tuple[int, Mapping[str, str]]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, facade.url + path, headers=headers) as answer,
    ):
        body = await answer.read()
        if answer.status in (401, 403) and method != "HEAD":
            check_envelope(answer.status, json.loads(body), answer.status)
        return answer.status, answer.headers


def all_routes(facade: Harness) -> set[tuple[str, str]]:
    from http_facade.app import create_app

    routes = create_app(facade.running.facade.config).router.routes()
    return {
        (route.method, route.resource.canonical) for route in routes if route.resource is not None
    }


async def test_every_route_but_the_probes_is_denied_without_a_key(facade: Harness) -> None:
    routes = all_routes(facade)
    assert len(routes) >= 12
    assert {path for _, path in routes} >= PROBES
    unknown = {("GET", "/no/such"), ("PUT", CHAT), ("OPTIONS", CHAT), ("POST", "/healthz/x")}
    for method, path in sorted(routes | unknown):
        for wrong in ({}, bearer("wrong"), bearer(PLAIN[:-1]), basic("wrong"), {"x-api-key": ""}):
            status, headers = await get(facade, path.replace("{model}", MODEL), wrong, method)
            if path in PROBES:
                assert status == 200
            else:
                assert status == 401, (method, path, wrong)
                assert headers["WWW-Authenticate"] == "Bearer"
    assert facade.fake.calls == []


async def test_keys_are_taken_where_they_may_stand(facade: Harness) -> None:
    for key in (PLAIN, OPERATOR, LOW):
        for given in (bearer(key), {"authorization": f"bearer  {key} "}, {"x-api-key": key}):
            assert (await facade.post(CHAT, chat(), given))[0] == 200
    # a key is never looked for in a query
    assert (await get(facade, f"/v1/models?api_key={PLAIN}"))[0] == 401


async def test_browsers_are_asked_for_a_password(facade: Harness) -> None:
    page = {"accept": "text/html,application/xhtml+xml"}
    for path in ("/", "/docs", "/traces"):
        status, headers = await get(facade, path, page)
        assert status == 401
        assert headers["WWW-Authenticate"] == 'Basic realm="firsttoken", charset="UTF-8"'
    assert (await get(facade, "/", {**page, **basic(PLAIN)}))[0] == 200
    assert (await get(facade, "/v1/models", basic(PLAIN, user="")))[0] == 200
    for broken in ("Basic", "Basic !!", "Basic " + base64.b64encode(b"\xff\xff").decode()):
        assert (await get(facade, "/", {"authorization": broken}))[0] == 401


async def test_a_password_that_a_browser_adds_unasked_changes_nothing(facade: Harness) -> None:
    """Another site can make a browser post with the password it knows; not so our own page."""
    for site in (None, "cross-site", "same-site", "none"):
        fetch = {} if site is None else {"sec-fetch-site": site}
        status, answer, _ = await facade.post(CHAT, chat(), {**basic(PLAIN), **fetch})
        check_envelope(status, answer, 401)
    ours = {**basic(PLAIN), "sec-fetch-site": "same-origin"}
    assert (await facade.post(CHAT, chat(), ours))[0] == 200


async def test_what_is_for_operators_takes_an_admin_key(facade: Harness) -> None:
    assert "/traces" in ADMIN_ROUTES
    for path in ("/traces", "/traces/0123", "/%74races", "/traces/"):
        for key in (PLAIN, LOW):
            assert (await get(facade, path, bearer(key)))[0] == 403
        assert (await get(facade, path, bearer(OPERATOR)))[0] not in (401, 403)
        assert (await get(facade, path))[0] == 401


async def test_the_official_client_says_why_it_was_not_let_in(facade: Harness) -> None:
    async with openai.AsyncOpenAI(base_url=facade.url, api_key=PLAIN) as client:
        with pytest.raises(openai.PermissionDeniedError) as denied:
            await client.get("/traces", cast_to=object)
    assert denied.value.status_code == 403
    assert isinstance(denied.value.body, dict)
    assert denied.value.body["message"] in str(denied.value)
    async with openai.AsyncOpenAI(base_url=facade.url, api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.get("/traces", cast_to=object)


async def test_a_keys_tenant_and_priority_hold_whatever_a_request_says(facade: Harness) -> None:
    for path in (CHAT, COMPLETIONS):
        for asked, gets in ((None, 2), (-9, 2), (4, 4), (9, 5)):
            facade.reset()
            fields = {"tenant": "finance", "cache_salt": "finance"}
            fields |= {} if asked is None else {"priority": asked}  # type: ignore[dict-item]
            status, answer, _ = await facade.post(path, body_for(path, **fields), bearer(LOW))
            assert status == 200, answer
            (request,) = facade.fake.requests
            # the engine hashes the salt together with the tenant: it reaches no other's prefixes
            assert (request.tenant, request.priority) == ("batch", gets)
            assert request.cache_salt == "finance"
    facade.reset()
    await facade.post(CHAT, chat(priority=-9), bearer(PLAIN))
    assert facade.fake.requests[0].priority == -9  # no range of its own: the engine's holds


async def test_a_changed_file_is_followed_and_running_requests_go_on(
    facade: Harness, keys_file: Path
) -> None:
    ids = facade.say("one two three four five six seven eight", delay_seconds=0.2)
    running = asyncio.create_task(facade.stream(CHAT, chat(), bearer(LOW)))
    await facade.fake.wait_for_calls(1)
    try:
        rewrite(keys_file, "keys: [{id: fresh, key: fresh-key}]")
        await until_status(facade, bearer(LOW), 401)
        assert (await get(facade, "/v1/models", bearer("fresh-key")))[0] == 200
        assert (await get(facade, "/v1/models", bearer(PLAIN)))[0] == 200
        rewrite(keys_file, "keys: [{id: fresh")
        await asyncio.sleep(1.2)
        assert (await get(facade, "/v1/models", bearer("fresh-key")))[0] == 200
    finally:
        rewrite(keys_file, FILE)
    await until_status(facade, bearer(LOW), 200)
    answer = await running
    assert len(answer.deltas()) == len(ids) and answer.finish_reasons() == ["stop"]


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)


async def until_status(facade: Harness, headers: Mapping[str, str], status: int) -> None:
    deadline = time.monotonic() + 10
    while (await get(facade, "/v1/models", headers))[0] != status:
        assert time.monotonic() < deadline, f"never {status}"
        await asyncio.sleep(0.05)


async def test_without_keys_only_what_is_for_operators_is_closed(embedded_model_dir: Path) -> None:
    edge = EdgeConfig(admin_key=admin_key(digest_of(OPERATOR)))
    async with facade_and_fake(embedded_model_dir, edge=edge) as facade:
        assert (await get(facade, "/v1/models"))[0] == 200
        assert (await get(facade, "/traces"))[0] == 401
        assert (await get(facade, "/traces", bearer("wrong")))[0] == 401
        assert (await get(facade, "/traces", bearer(OPERATOR)))[0] not in (401, 403)
        facade.say("fine")
        assert (await facade.post(CHAT, chat()))[0] == 200
        assert facade.fake.requests[0].tenant == ""


async def test_an_open_door_is_said_loudly(
    embedded_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for host, keys, is_warned in (
        ("0.0.0.0", (), True),
        ("0.0.0.0", plain_keys(["k"]), False),
        ("127.0.0.1", (), False),
    ):
        caplog.clear()
        edge = EdgeConfig(api_keys=keys)
        async with facade_and_fake(embedded_model_dir, host=host, edge=edge) as facade:
            assert (await get(facade, "/healthz"))[0] == 200  # a warning, and no refusal
        assert ("ANYONE WHO REACHES 0.0.0.0" in caplog.text) is is_warned


async def test_the_engine_is_told_which_try_it_is(facade: Harness) -> None:
    for count, attempt in ((None, None), ("0", 1), ("2", 3), ("many", None), ("-1", None)):
        facade.reset()
        sent = {} if count is None else {"x-stainless-retry-count": count}
        assert (await facade.post(CHAT, chat(), {**bearer(PLAIN), **sent}))[0] == 200
        assert facade.fake.requests[0].attempt == attempt
