"""Whether a text is what `workloads.PERSON_SCHEMA` asks for, checked by hand and to the letter."""

from __future__ import annotations

import json

_MAX_TAGS = 3


def is_valid_person(text: str) -> bool:
    try:
        person: object = json.loads(text)
    except ValueError:
        return False
    if not isinstance(person, dict) or person.keys() != {"name", "age", "tags"}:
        return False
    tags: object = person["tags"]
    return (
        isinstance(person["name"], str)
        and _is_integer(person["age"])
        and isinstance(tags, list)
        and len(tags) <= _MAX_TAGS
        and all(isinstance(tag, str) for tag in tags)
    )


def _is_integer(value: object) -> bool:
    """As JSON Schema has it: 3.0 is one, true is none."""
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)
