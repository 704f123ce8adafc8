"""Pages of other sites: closed by default, open to those that are named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from access.keys import plain_keys
from http_facade.edge import EdgeConfig
from tests.facade_harness import CHAT, Harness, chat, check_envelope, facade_and_fake

ORIGIN = "https://app.example"
KEY = {"authorization": "Bearer k"}


def edge(*origins: str) -> EdgeConfig:
    return EdgeConfig(api_keys=plain_keys(["k"]), allowed_origins=origins)


async def preflight(
    facade: Harness, origin: str, path: str = CHAT, **headers: str
) -> tuple[int, Mapping[str, str]]:
    sent = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-stainless-os",
        **headers,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.options(facade.url + path, headers=sent) as answer,
    ):
        body = await answer.read()
        assert (answer.status == 204) == (body == b"")
        return answer.status, answer.headers


def cors_headers(headers: Mapping[str, str]) -> set[str]:
    return {name.lower() for name in headers if name.lower().startswith("access-control")}


async def test_closed_by_default(embedded_model_dir: Path) -> None:
    async with facade_and_fake(embedded_model_dir, edge=edge()) as facade:
        status, headers = await preflight(facade, ORIGIN)
        assert status == 401 and not cors_headers(headers)
        facade.say("fine")
        status, _, headers = await facade.post(CHAT, chat(), {**KEY, "origin": ORIGIN})
        assert status == 200  # it is the browser that keeps the page from reading it
        assert not cors_headers(headers) and "vary" not in {name.lower() for name in headers}


async def test_what_a_browser_lets_any_page_send_is_refused(embedded_model_dir: Path) -> None:
    """A body without a type, or of a form's types, is sent without a preflight."""
    async with (
        facade_and_fake(embedded_model_dir, edge=edge()) as facade,
        aiohttp.ClientSession() as session,
    ):
        facade.say("fine")
        for headers, expected in (
            ({"origin": ORIGIN}, 415),
            ({"origin": ORIGIN, "content-type": "text/plain"}, 415),
            ({}, 200),
        ):
            async with session.post(
                facade.url + CHAT,
                data=json.dumps(chat()).encode(),
                headers={**KEY, **headers},
                skip_auto_headers=["content-type"],
            ) as answer:
                assert answer.status == expected, headers
                await answer.read()
        assert len(facade.fake.calls) == 1


async def test_open_to_those_that_are_named(embedded_model_dir: Path) -> None:
    async with facade_and_fake(
        embedded_model_dir, edge=edge(ORIGIN, "http://localhost:3000")
    ) as facade:
        status, headers = await preflight(facade, ORIGIN)  # carries no key, by design
        assert status == 204
        assert headers["Access-Control-Allow-Origin"] == ORIGIN
        assert "x-stainless-os" in headers["Access-Control-Allow-Headers"]
        assert "POST" in headers["Access-Control-Allow-Methods"]
        assert "Access-Control-Allow-Credentials" not in headers
        assert headers["Vary"] == "Origin" and headers["x-request-id"]
        for stranger in ("https://evil.example", "null", "https://app.example.evil", ""):
            status, headers = await preflight(facade, stranger)
            assert status == 401 and not cors_headers(headers)
        facade.say("fine")
        sent = {**KEY, "origin": ORIGIN}
        _, _, headers = await facade.post(CHAT, chat(), sent)
        assert headers["Access-Control-Allow-Origin"] == ORIGIN
        exposed = headers["Access-Control-Expose-Headers"]
        for name in ("x-request-id", "retry-after", "retry-after-ms", "x-ratelimit-reset-tokens"):
            assert name in exposed
        answer = await facade.stream(CHAT, chat(), sent)
        assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
        # a page can read why it was refused
        status, body, headers = await facade.post(CHAT, chat(), {"origin": ORIGIN})
        check_envelope(status, body, 401)
        assert headers["Access-Control-Allow-Origin"] == ORIGIN
        _, _, headers = await facade.post(CHAT, chat(), {**KEY, "origin": "https://evil.example"})
        assert not cors_headers(headers)


async def test_open_to_all(embedded_model_dir: Path) -> None:
    async with facade_and_fake(embedded_model_dir, edge=edge("*")) as facade:
        status, headers = await preflight(facade, "https://anyone.example")
        assert status == 204 and headers["Access-Control-Allow-Origin"] == "*"
        # what could end a header early is not repeated
        _, headers = await preflight(facade, ORIGIN, **{"access-control-request-headers": "a;b(c)"})
        assert "Access-Control-Allow-Headers" not in headers
        # an OPTIONS that is no preflight is a request like others
        async with (
            aiohttp.ClientSession() as session,
            session.options(facade.url + CHAT, headers={"origin": ORIGIN}) as answer,
        ):
            check_envelope(answer.status, json.loads(await answer.read()), 401)
