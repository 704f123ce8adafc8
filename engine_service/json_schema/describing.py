"""Keywords that allow and forbid nothing."""

from __future__ import annotations

from typing import Final

from engine_service.schema_error import Json

DESCRIBING: Final = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "$comment",
        "$schema",
        "$id",
        "$defs",
        "definitions",
    ]
)


def describes(key: str, value: Json) -> bool:
    """Whether the keyword, with this value, asks for nothing."""
    asks_nothing = key in ("uniqueItems", "nullable") and value is False
    return asks_nothing or key in DESCRIBING or key.startswith("x-")
