"""What becomes of a keyword that no grammar enforces: a refusal, or its end."""

from __future__ import annotations

from engine_service.json_schema.document import Node
from engine_service.schema_error import Json, refused


class Unenforced:
    """Called where one is met, before anything is read of it.

    With `relax` it is taken out of the document, which then allows more: the caller reads on
    without it. A oneOf becomes an anyOf.
    """

    def __init__(self, *, relax: bool) -> None:
        self._relax = relax
        self.relaxed: dict[str, None] = {}  # paths, in order
        self._out: list[Json] = []  # kept, for schemas are known by where they lie in memory

    def __call__(self, node: Node, key: str, why: str, member: int | None = None) -> None:
        if node.rewritten is not None:
            node, key = node.rewritten
        name = key if len(key) <= 60 else f"{key[:57]}..."
        if not self._relax:
            place = f"{node.path}.{name}"
            raise refused(place if member is None else f"{place}[{member}]", why)
        if not isinstance(node.schema, dict) or key not in node.schema:
            return  # of a keyword that was rewritten and is out already
        self.relaxed[f"{node.path}.{name}"] = None
        value = node.schema.pop(key)
        self._out.append(value)
        if key == "oneOf":
            choices = node.schema.setdefault("allOf", [])
            choice: Json = {"anyOf": value}
            if isinstance(choices, list):
                choices.append(choice)
