"""/v1/models: the models of all engines, under each name that they are served by."""

from __future__ import annotations

import msgspec
from aiohttp import web

from http_facade.facade import FACADE, Facade


class ModelBody(msgspec.Struct, frozen=True, tag_field="object", tag="model"):
    id: str
    created: int
    max_model_len: int
    owned_by: str = "firsttoken"


class ModelList(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    data: list[ModelBody]


async def list_models(request: web.Request) -> web.Response:
    facade = request.app[FACADE]
    return _json(ModelList([_model(facade, name) for name in facade.engines.names()]))


async def get_model(request: web.Request) -> web.Response:
    facade = request.app[FACADE]
    name = request.match_info["model"]
    return _json(_model(facade, name))


def _model(facade: Facade, name: str) -> ModelBody:
    info = facade.served_model(name).info
    return ModelBody(name, info.created_unix_seconds, info.max_model_len)


def _json(document: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")
