"""A JSON Schema, checked, and the grammar that enforces it: all of it, or it is refused.

    document -> conjunctions -> shapes -> grammar       (see `json_schema`)

Every text that the grammar allows validates; not every value that validates can be written in it.
An object holds the properties its schema names, in that order, and no others unless the schema
asks for them; numbers have at most 15 digits; formats are taken narrowly.

Needs neither torch nor the grammar compiler, which takes its time over some documents: what would
take too long is refused here, with the place in the schema.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from engine_service.json_schema.document import Node, parse, subschemas
from engine_service.json_schema.forms import check_forms
from engine_service.json_schema.reader import Reader
from engine_service.json_schema.unenforced import Unenforced
from engine_service.json_schema.writer import Writer
from engine_service.schema_error import refused

_MAX_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class CheckedSchema:
    text: str  # the document, without what was relaxed; checked again it gives the same grammar
    relaxed: tuple[str, ...]  # paths of the keywords that are not enforced and were taken out
    grammar: str  # for the grammar compiler: EBNF, its root rule is `root`


def check_schema(text: str, *, relax: bool = False) -> CheckedSchema:
    """With `relax`, keywords that can't be enforced are taken out, which only allows more.

    Raises InvalidRequest with the place and the reason.
    """
    root = parse(text)
    if root is False:
        raise refused("$", "the schema allows no value")
    for node in subschemas(Node("$", root)):
        check_forms(node, root)
    unenforced = Unenforced(relax=relax)
    for _ in range(_MAX_ROUNDS):
        # What is taken out may have been read before, as of another type: once more without it.
        before = len(unenforced.relaxed)
        try:
            grammar = Writer(Reader(root, unenforced)).write((Node("$", root),))
        except RecursionError as error:
            raise refused("$", "its schemas refer to each other too deeply") from error
        if len(unenforced.relaxed) == before:
            relaxed = tuple(unenforced.relaxed)
            checked = json.dumps(root, ensure_ascii=False) if relaxed else text
            return CheckedSchema(checked, relaxed, grammar)
    raise refused("$", "the schema has too many keywords that can't be enforced")
