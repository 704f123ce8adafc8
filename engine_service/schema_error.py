"""The words of a schema's refusal: where in the schema, and why."""

from __future__ import annotations

import json
from typing import Final

from engine_service.errors import InvalidRequest

FIELD: Final = "structured_output.json_schema"
_MAX_PLACE_CHARS: Final = 300

# What json.loads gives; objects of a schema are dicts, whatever a client put in them.
Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None
Schema = dict[str, Json]


def refused(path: str, why: str) -> InvalidRequest:
    """`path` may hold what a client wrote: it is cut, and keeps its end."""
    place = path if len(path) <= _MAX_PLACE_CHARS else f"$...{path[4 - _MAX_PLACE_CHARS :]}"
    return InvalidRequest(f"{place}: {why}", field=FIELD)


def shown(value: Json) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
