"""The /traces page in headless Chromium, in front of a real engine and facade."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser import headless_browser, watched_page
from tests.conftest import MakeTinyModel
from tests.serving import Served, serve, stream
from tests.stored_requests import read_request
from tests.ttft_load import FLAGS, MODEL
from traces import names

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LONG, SHORT = "a" * 32, "b" * 32
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with headless_browser() as started:
        yield started


@pytest.fixture(scope="module")
def traced(
    tiny_model_dir: MakeTinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """After two requests: a short prompt that came while a long one was computed."""
    work_dir = tmp_path_factory.mktemp("traced")
    model_dir = tiny_model_dir("llama", **MODEL)
    with serve(model_dir, work_dir, *FLAGS, "--enable-traces-page") as served:
        asyncio.run(two_requests(served))
        wait_whole(served)
        yield served


async def two_requests(served: Served) -> None:
    async def send(trace_id: str, prompt: list[int]) -> None:
        body = {"model": served.model, "prompt": prompt, "max_tokens": 3, "ignore_eos": True}
        headers = {"traceparent": f"00-{trace_id}-{'c' * 16}-01"}
        assert (await stream(served.http, COMPLETIONS, body, headers)).num_done == 1

    long = asyncio.create_task(send(LONG, [1_000 + i for i in range(1_500)]))
    await asyncio.sleep(0.05)
    await send(SHORT, [5_000 + i for i in range(20)])
    await long


def wait_whole(served: Served) -> None:
    """Exports run once a second, of each process by itself."""
    deadline = time.monotonic() + 10
    for trace_id in (LONG, SHORT):
        while (
            (view := read_request(served.trace_dir, trace_id)) is None
            or view.facade is None
            or view.call is None
            or names.SPAN_DECODE not in view.call.stages
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_requests_are_listed_and_one_is_drawn(
    traced: Served, browser: Browser, tmp_path: Path
) -> None:
    with watched_page(browser, viewport={"width": 1280, "height": 900}) as watched:
        page = watched.page
        page.goto(traced.http + "/traces")
        rows = page.get_by_role("table", name="Requests").locator("tbody tr")
        expect(rows).to_have_count(2)
        assert [row.get_attribute("title") for row in rows.locator("th").all()] == [SHORT, LONG]
        page.screenshot(path=tmp_path / "list.png")
        rows.first.get_by_role("link").click()
        expect(page).to_have_url(f"{traced.http}/traces/{SHORT}")
        parts = page.get_by_role("table", name="Waterfall").locator("tbody tr")
        expect(parts.last).to_contain_text("unattributed")
        shown = {row.locator("th").inner_text() for row in parts.all()}
        wanted = {"tokenize", "network", "admit", "prefill", "prefill others", "first write"}
        assert wanted <= shown
        share = page.locator(".facts").inner_text()
        attributed = re.search(r"attributed ([\d.]+) %", share)
        assert attributed is not None and float(attributed[1]) >= 98
        # who had the steps
        neighbours = page.get_by_role("table", name="Who shared its steps").locator("tbody tr")
        expect(neighbours).to_have_count(1)
        expect(neighbours.get_by_role("link")).to_have_attribute("href", f"/traces/{LONG}")
        expect(page.locator(".said")).to_contain_text("the work of other requests")
        page.get_by_text(re.compile("All .* spans")).click()
        spans = page.get_by_role("table", name="Spans").locator("tbody tr")
        assert {"queue", "prefill", "decode"} <= {
            row.locator("th").inner_text() for row in spans.all()
        }
        page.screenshot(path=tmp_path / "trace.png", full_page=True)
        neighbours.get_by_role("link").click()
        expect(page).to_have_url(f"{traced.http}/traces/{LONG}")
        expect(page.locator(".facts")).to_contain_text("prompt tokens 1500")
        assert watched.complaints == []
        assert {url for url in watched.requested if not url.startswith(traced.http)} == set()


def test_the_list_is_filtered_and_the_address_keeps_it(traced: Served, browser: Browser) -> None:
    with watched_page(browser) as watched:
        page = watched.page
        page.goto(traced.http + "/traces")
        rows = page.get_by_role("table", name="Requests").locator("tbody tr")
        expect(rows).to_have_count(2)
        page.get_by_label("Text").fill(LONG[:10])
        page.get_by_role("button", name="Show").click()
        expect(rows).to_have_count(1)
        page.reload()
        expect(rows).to_have_count(1)
        page.get_by_label("Errors only").check()
        expect(page.get_by_text("No request fits.")).to_be_visible()
        page.go_back()
        expect(rows).to_have_count(1)
        assert watched.complaints == []
        page.goto(f"{traced.http}/traces/{'0' * 32}")
        expect(page.get_by_role("status")).to_contain_text("has no request with this trace id")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(traced: Served, browser: Browser, scheme: str, tmp_path: Path) -> None:
    phone = {"width": 360, "height": 720}
    with watched_page(browser, viewport=phone, color_scheme=scheme) as watched:
        page = watched.page
        for path, name in (("/traces", "Requests"), (f"/traces/{SHORT}", "Waterfall")):
            page.goto(traced.http + path)
            expect(page.get_by_role("table", name=name)).to_be_visible()
            page.screenshot(path=tmp_path / f"{name}.png")
            assert page.evaluate("document.documentElement.scrollWidth") <= phone["width"]
        assert watched.complaints == []
