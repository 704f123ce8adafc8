"""The pages in headless Chromium, in front of the real server with the embedded model."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, Route, expect

from clients.sync_client import SyncEngineClient
from tests.browser import headless_browser, watched_page
from tests.serving import Served, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PHONE = {"width": 360, "height": 720}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with headless_browser() as started:
        yield started


@pytest.fixture(scope="module")
def guarded(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that asks for a key."""
    work_dir = tmp_path_factory.mktemp("guarded")
    with serve(embedded_model_dir, work_dir, "--api-key", "secret-1") as running:
        yield running


def open_chat(page: Page, served: Served) -> None:
    page.goto(served.http + "/")
    expect(page.get_by_label("Model")).to_be_enabled(timeout=20_000)


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def sent_body(request: Request) -> dict[str, Any]:
    body = request.post_data_json
    assert isinstance(body, dict)
    return body


def never_end(page: Page) -> None:
    """What is asked from now on has no end of its own."""

    def go_on(route: Route) -> None:
        route.continue_(post_data={**sent_body(route.request), "ignore_eos": True})

    page.route("**/v1/chat/completions", go_on)


def cancelled_chats(served: Served) -> int:
    """Requests whose client was gone, as the metrics have them."""
    with urllib.request.urlopen(served.http + "/metrics") as answer:
        text = answer.read().decode()
    lines = [
        line
        for line in text.splitlines()
        if line.startswith("http_server_answers_total")
        and '"/v1/chat/completions"' in line
        and '"499"' in line
    ]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


def wait_idle(served: Served) -> None:
    with SyncEngineClient(served.grpc) as client:
        for _ in range(200):
            load = client.get_load()
            if load.num_running == load.num_waiting == load.used_blocks == 0:
                assert load.free_blocks + load.cached_blocks == load.total_blocks
                return
    raise AssertionError(f"not idle: {load}")


def test_a_chat_is_streamed_and_tells_of_its_time(
    served: Served, browser: Browser, tmp_path: Path
) -> None:
    with watched_page(browser) as watched:
        page = watched.page
        open_chat(page, served)
        page.get_by_label("System prompt").fill("You answer briefly.")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Max tokens").fill("80")
        page.get_by_label("Seed").fill("7")
        ask(page, "What is the capital of France? <img src=x onerror=alert(1)>")
        message = page.locator(".message.assistant")
        expect(message.locator(".text")).to_have_text(re.compile(r"\w"), timeout=20_000)
        expect(message.locator(".trace")).to_be_visible(timeout=60_000)
        facts = message.locator(".facts").inner_text()
        for fact in (r"tokens\s+\d+", r"TTFT\s+\d+ ms", r"tokens/s\s+\d+", r"end\s+(stop|length)"):
            assert re.search(fact, facts), facts
        assert message.locator(".request-id").inner_text().startswith("chatcmpl-")
        # what was typed is text, not a picture
        assert "<img src=x" in page.locator(".message.user .text").inner_text()
        assert page.locator("#log img").count() == 0
        page.screenshot(path=tmp_path / "chat.png")
        # a second question has the first one and its answer before it
        with page.expect_request("**/v1/chat/completions") as second:
            ask(page, "And of Spain?")
        sent = sent_body(second.value)
        roles = [message["role"] for message in sent["messages"]]
        assert roles == ["system", "user", "assistant", "user"]
        assert (sent["temperature"], sent["max_tokens"], sent["seed"]) == (0, 80, 7)
        assert "top_p" not in sent
        expect(page.locator(".trace")).to_have_count(2, timeout=60_000)
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".message")).to_have_count(0)
        assert watched.complaints == []
        assert {url for url in watched.requested if not url.startswith(served.http)} == set()


def test_the_trace_that_is_named_is_the_requests(served: Served, browser: Browser) -> None:
    with watched_page(browser) as watched:
        page = watched.page
        open_chat(page, served)
        with page.expect_response("**/v1/chat/completions") as answered:
            ask(page, "Say hello.")
        trace = page.locator(".trace")
        expect(trace).to_be_visible(timeout=60_000)
        parent = answered.value.request.headers["traceparent"]
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", parent)
        trace_id = parent.split("-")[1]
        assert trace_id in trace.inner_text()
        link = trace.locator("a")
        if link.count():
            assert link.get_attribute("href") == f"/traces/{trace_id}"
        else:
            assert f"firsttoken ttft {trace_id}" in trace.inner_text()
        assert answered.value.headers["x-request-id"] == page.locator(".request-id").inner_text()


def test_stop_ends_the_generation_on_the_server(
    served: Served, browser: Browser, tmp_path: Path
) -> None:
    before = cancelled_chats(served)
    with watched_page(browser) as watched:
        page = watched.page
        open_chat(page, served)
        never_end(page)
        page.get_by_label("Max tokens").fill("7000")
        for stop in ("button", "key"):
            ask(page, "Count as far as you can.")
            text = page.locator(".message.assistant .text").last
            expect(text).to_have_text(re.compile(r"\w"), timeout=20_000)
            if stop == "button":
                page.get_by_role("button", name="Stop").click()
            else:
                page.keyboard.press("Escape")
            expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=5_000)
            expect(page.locator(".facts").last).to_contain_text("stopped")
            expect(page.locator(".trace").last).to_be_visible()
            said = text.inner_text()
            page.wait_for_timeout(300)
            assert text.inner_text() == said  # nothing comes after it
            wait_idle(served)
        assert cancelled_chats(served) == before + 2
        page.screenshot(path=tmp_path / "stopped.png")
        assert watched.complaints == []


def test_what_the_server_refuses_is_shown(served: Served, browser: Browser) -> None:
    with watched_page(browser) as watched:
        page = watched.page
        open_chat(page, served)
        ask(page, "many words " * 9_000)
        expect(page.get_by_role("alert")).to_contain_text("context", timeout=20_000)
        expect(page.locator(".facts")).to_contain_text("failed")
        # it is no part of the chat, which goes on
        page.get_by_label("Max tokens").fill("4")
        with page.expect_request("**/v1/chat/completions") as second:
            ask(page, "Hello?")
        assert len(sent_body(second.value)["messages"]) == 1
        expect(page.locator(".facts").last).to_contain_text("end", timeout=20_000)
        # and a setting that can't be is not sent
        page.get_by_label("Temperature").fill("3")
        page.get_by_label("Message").fill("Hello again")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".message.user")).to_have_count(2)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pages_fit_a_phone_and_have_names_for_everything(
    served: Served, browser: Browser, scheme: str, tmp_path: Path
) -> None:
    with watched_page(browser, viewport=PHONE, color_scheme=scheme) as watched:
        page = watched.page
        open_chat(page, served)
        expect(page.get_by_label("Temperature")).to_be_hidden()
        page.get_by_text("Settings").click()
        expect(page.get_by_label("Temperature")).to_be_visible()
        page.screenshot(path=tmp_path / "phone.png")
        for path, shown in (("/", "#prompt"), ("/docs", "#schema-ChatRequest")):
            page.goto(served.http + path)
            page.locator(shown).wait_for()
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= PHONE["width"], path
            nameless = page.evaluate(
                "Array.from(document.querySelectorAll('input, select, textarea, button, a'))"
                ".filter(e => !(e.labels?.length || e.textContent.trim() || e.ariaLabel))"
                ".map(e => e.outerHTML)"
            )
            assert nameless == []
        page.screenshot(path=tmp_path / "docs.png")
        assert watched.complaints == []


def test_the_docs_page_shows_every_route_and_field(served: Served, browser: Browser) -> None:
    with watched_page(browser) as watched:
        page = watched.page
        page.goto(served.http + "/docs")
        page.locator("#schema-ChatRequest").wait_for()
        document = page.evaluate("fetch('/openapi.json').then(answer => answer.json())")
        text = page.locator("main").inner_text()
        for path in document["paths"]:
            assert path in text
        for field in document["components"]["schemas"]["ChatRequest"]["properties"]:
            assert field in text
        page.get_by_label("Contents").get_by_text("ChatRequest").click()
        expect(page.locator("#schema-ChatRequest")).to_be_in_viewport()
        assert watched.complaints == []
        assert {url for url in watched.requested if not url.startswith(served.http)} == set()


def test_a_server_with_keys_asks_for_one(guarded: Served, browser: Browser) -> None:
    """The browser itself is let in with the key as password; the page's field is for the API."""
    credentials = {"username": "me", "password": "secret-1"}
    with watched_page(browser, http_credentials=credentials) as watched:
        page = watched.page
        open_chat(page, guarded)
        page.get_by_label("Max tokens").fill("4")
        ask(page, "Hello?")
        expect(page.locator(".facts")).to_contain_text("end", timeout=20_000)
        page.evaluate("sessionStorage.setItem('firsttoken-api-key', 'wrong')")
        page.reload()
        expect(page.get_by_text("This key is not taken.")).to_be_visible()
        key = page.get_by_label("API key")
        expect(key).to_be_visible()
        key.fill("secret-1")
        key.press("Tab")
        expect(page.get_by_label("Model")).to_be_enabled()
        assert page.evaluate("sessionStorage.getItem('firsttoken-api-key')") == "secret-1"
        page.get_by_label("Max tokens").fill("4")
        ask(page, "Hello?")
        expect(page.locator(".facts")).to_contain_text("end", timeout=20_000)
    with watched_page(browser) as watched:
        answer = watched.page.request.get(guarded.http + "/", headers={"accept": "text/html"})
        assert answer.status == 401
        assert answer.headers["www-authenticate"].startswith("Basic")
