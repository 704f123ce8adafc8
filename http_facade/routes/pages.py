"""What a browser opens: the chat page at /, the API's page at /docs, /openapi.json.

The pages are files of `http_facade/pages` and need nothing from elsewhere; their
Content-Security-Policy allows nothing else.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

import msgspec
from aiohttp import web

from http_facade.errors import ApiError
from http_facade.facade import FACADE, Facade
from http_facade.openapi import openapi_document

_HTML = "text/html"
_MEDIA_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Cache-Control": "no-cache",  # a newer server has newer pages
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_NO_TRACE_PAGE = b'<meta name="trace-page" content="no">'
_TRACE_PAGE = b'<meta name="trace-page" content="yes">'


def _read_files() -> dict[str, bytes]:
    folder = resources.files("http_facade") / "pages"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


_FILES = _read_files()


async def chat_page(request: web.Request) -> web.Response:
    page = _FILES["chat.html"]
    if _has_trace_page(request.app):
        page = page.replace(_NO_TRACE_PAGE, _TRACE_PAGE)
    return _answer(page, _HTML)


def file_answer(name: str) -> web.Response:
    """A page that is the same for everybody."""
    return _answer(_FILES[name], _HTML)


async def docs_page(request: web.Request) -> web.Response:
    return file_answer("docs.html")


async def asset(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    media_type = _MEDIA_TYPES.get(name.rpartition(".")[2])
    if media_type is None or name not in _FILES:
        raise web.HTTPNotFound
    return _answer(_FILES[name], media_type)


async def openapi(request: web.Request) -> web.Response:
    facade = request.app[FACADE]
    document = _document(_shown_model(facade), shows_traces=facade.config.enable_traces_page)
    return _answer(document, "application/json")


def _answer(body: bytes, media_type: str) -> web.Response:
    return web.Response(body=body, content_type=media_type, charset="utf-8", headers=_HEADERS)


def _has_trace_page(app: web.Application) -> bool:
    """Another part of the server shows traces, or none does: then the page names the command."""
    return any(one.canonical.startswith("/traces/{") for one in app.router.resources())


def _shown_model(facade: Facade) -> str:
    """The name that examples show, so that they can be sent as they stand."""
    try:
        return facade.engines.names()[0]
    except ApiError:  # there is no engine yet
        return "MODEL"


@lru_cache(maxsize=8)
def _document(model: str, *, shows_traces: bool) -> bytes:
    return msgspec.json.encode(openapi_document(model, shows_traces=shows_traces))
