"""CASE V4 for every route there is: methods, HEAD, OPTIONS and slashes that do not fit; pages."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from importlib import resources
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from http_facade.openapi_routes import OPERATIONS
from tests.facade_harness import MODEL, Harness, check_envelope, facade_and_fake

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Path and the methods that it takes.
ROUTES = {
    operation.path.replace("{model}", MODEL).replace("{name}", "style.css"): operation.method
    for operation in OPERATIONS
}
EVERY_ROUTE = pytest.mark.parametrize("path", sorted(ROUTES))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def facade(embedded_model_dir: Path) -> AsyncIterator[Harness]:
    async with facade_and_fake(embedded_model_dir) as harness:
        yield harness


async def ask(facade: Harness, method: str, path: str) -> tuple[int, bytes, Mapping[str, str]]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, facade.url + path) as answer,
    ):
        assert answer.headers["x-request-id"]
        return answer.status, await answer.read(), answer.headers


@EVERY_ROUTE
async def test_v4_methods_that_a_route_does_not_take(facade: Harness, path: str) -> None:
    takes = ROUTES[path]
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        if method == takes:
            continue
        status, raw, headers = await ask(facade, method, path)
        error = check_envelope(status, json.loads(raw), 405)
        assert error["code"] == "method_not_allowed"
        assert takes in headers["Allow"]


@EVERY_ROUTE
async def test_v4_head_is_get_without_a_body(facade: Harness, path: str) -> None:
    status, raw, headers = await ask(facade, "HEAD", path)
    assert raw == b""
    if ROUTES[path] == "GET":
        assert status == 200
        _, whole, _ = await ask(facade, "GET", path)
        if path != "/metrics":  # which counts requests, this one too
            assert int(headers["Content-Length"]) == len(whole)
    else:
        assert status == 405


@EVERY_ROUTE
async def test_v4_a_slash_too_many_is_another_path(facade: Harness, path: str) -> None:
    status, raw, _ = await ask(facade, ROUTES[path], "//" if path == "/" else path + "/")
    check_envelope(status, json.loads(raw), 404)


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize("path", ["/", "/docs", "/assets/chat.js", "/assets/style.css"])
async def test_pages_need_nothing_from_elsewhere(facade: Harness, path: str) -> None:
    _, raw, headers = await ask(facade, "GET", path)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    text = raw.decode()
    assert re.findall(r"(?:https?:)?//(?!\s)[\w.]+\.\w+", text) == []
    for own in re.findall(r'(?:src|href)="([^"#]+)"', text):
        assert (await ask(facade, "GET", own))[0] == 200, own


async def test_pages_never_parse_text_as_html() -> None:
    for file in (resources.files("http_facade") / "pages").iterdir():
        if file.name.endswith(".js"):
            code = re.sub(r"//.*", "", file.read_text(encoding="utf-8"))
            for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
                assert word not in code, file.name


async def test_only_the_pages_own_files_are_given_away(facade: Harness) -> None:
    for name in ("none.js", "chat.html", "..%2fflags.py", "%2e%2e/flags.py", "%2fetc%2fpasswd"):
        async with (
            aiohttp.ClientSession() as session,
            session.get(facade.url + "/assets/" + name) as answer,
        ):
            check_envelope(answer.status, await answer.json(), 404)


async def test_the_chat_page_is_told_whether_traces_can_be_seen(facade: Harness) -> None:
    _, raw, _ = await ask(facade, "GET", "/")
    has_page = any(operation.path.startswith("/traces/{") for operation in OPERATIONS)
    expected = "yes" if has_page else "no"
    assert f'<meta name="trace-page" content="{expected}">' in raw.decode()
