"""A headless browser for tests of pages: the system's Chromium, driven by playwright."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_MISSING = "no Chromium is installed: run scripts/install_browser.sh"


def chromium_path() -> str:
    """Skips the test where there is none; under CI it fails."""
    for name in _NAMES:
        if (path := shutil.which(name)) is not None:
            return path
    if os.environ.get("CI") == "true":
        pytest.fail(_MISSING)
    pytest.skip(_MISSING)


@contextlib.contextmanager
def headless_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path())
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """A page, and what it complained of."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)  # URLs


@contextlib.contextmanager
def watched_page(browser: Browser, **context: Any) -> Iterator[Watched]:
    """`context`: playwright's options of a browser context. Nothing is shared with others."""
    with contextlib.closing(browser.new_context(**context)) as fresh:
        watched = Watched(fresh.new_page())
        watched.page.on(
            "console",
            lambda said: (
                watched.complaints.append(said.text) if said.type in ("error", "warning") else None
            ),
        )
        watched.page.on("pageerror", lambda error: watched.complaints.append(str(error)))
        watched.page.on("request", lambda request: watched.requested.append(request.url))
        yield watched
