"""From conjunctions of schemas to shapes; what can't be enforced is refused, or taken out.

Every keyword is read here: one that allows and forbids nothing is passed over, any other is
enforced by the shapes or ends in `_unenforced`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from engine_service.json_schema.array_reader import read_array
from engine_service.json_schema.automata import TooManyStates
from engine_service.json_schema.describing import describes
from engine_service.json_schema.disjoint import Comparison
from engine_service.json_schema.document import Node, resolve
from engine_service.json_schema.forms import TYPES
from engine_service.json_schema.negation import NOT_AMONG, NOT_FOUND, opposite
from engine_service.json_schema.object_reader import read_object
from engine_service.json_schema.shapes import Circular, Conjunction, Shape, Values, key_of
from engine_service.json_schema.simple_readers import read_number, read_string
from engine_service.json_schema.unenforced import Unenforced
from engine_service.json_schema.values import fits_any, identity, type_of
from engine_service.schema_error import Json, Schema, refused

MAX_ALTERNATIVES: Final = 500  # of one conjunction
MAX_CHOICES: Final = 50  # between members, for one value
MAX_CHOSEN: Final = 20_000  # members that are tried, in one document

_IN_PLACE: Final = (
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
)
# Keywords that speak of values of one kind, and nothing of others.
KIND_OF: Final[dict[str, str]] = {
    key: kind
    for kind, keys in {
        "string": ("minLength", "maxLength", "pattern", "format", NOT_FOUND, NOT_AMONG),
        "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        "array": (
            *("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"),
            *("contains", "minContains", "uniqueItems"),
        ),
        "object": (
            *("properties", "required", "additionalProperties", "unevaluatedProperties"),
            *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
        ),
    }.items()
    for key in keys
}
ENFORCED: Final = frozenset((*_IN_PLACE, "type", "enum", "const", *KIND_OF))
_NEEDS: Final = {"then": "if", "else": "if", "minContains": "contains"}

World = tuple[Node, ...]  # schemas of one conjunction without a choice left between them


class Reader:
    """Of one document. `unenforced` says what becomes of keywords that no grammar enforces."""

    def __init__(self, root: Schema | bool, unenforced: Unenforced) -> None:
        self._root = root
        self._unenforced = unenforced
        self._comparison = Comparison(self.alternatives)
        self._num_chosen = 0
        self._open: set[frozenset[int]] = set()  # being read
        self._read: dict[frozenset[int], tuple[Shape, ...]] = {}
        self._opposites: dict[int, Schema | bool | None] = {}
        self._made: dict[tuple[int, str], list[Schema | bool]] = {}

    def alternatives(self, conjunction: Conjunction) -> tuple[Shape, ...]:
        """None at all where no value fits. Raises InvalidRequest, or Circular."""
        key = key_of(conjunction)
        if key not in self._read:
            if key in self._open:
                raise Circular
            self._open.add(key)
            try:
                self._read[key] = tuple(self._all_shapes(conjunction))
            except TooManyStates as error:
                raise refused(conjunction[0].path, "patterns take too long to compare") from error
            finally:
                self._open.remove(key)
        return self._read[key]

    def written_alternatives(self, conjunction: Conjunction) -> tuple[Shape, ...]:
        """Those that are worth writing: without a `type`, of the kinds that the keywords are for.

        `properties` alone also allows any number or string, which nobody means by it.
        """
        return tuple(self._all_shapes(conjunction, only_meant=True))

    def _all_shapes(self, conjunction: Conjunction, *, only_meant: bool = False) -> Iterator[Shape]:
        for count, world in enumerate(self._worlds(list(conjunction), (), ()), start=1):
            if count > MAX_ALTERNATIVES:
                raise refused(conjunction[0].path, f"has more than {MAX_ALTERNATIVES} alternatives")
            yield from self._shapes(world, only_meant=only_meant)

    def _worlds(
        self, pending: list[Node], world: World, choices: tuple[tuple[Node, ...], ...]
    ) -> Iterator[World]:
        """Every way to choose one member of each anyOf."""
        pending = list(pending)
        found = list(world)
        open_choices = list(choices)
        while pending:
            node = pending.pop(0)
            if node.schema is True:
                continue
            if node.schema is False:
                return
            self._check_ends(node)
            self._check_keywords(node)
            if all(node.schema is not other.schema for other in found):
                found.append(node)
                pending += self._same_value(node)
                open_choices += self._choices(node)
        if not open_choices:
            yield tuple(found)
            return
        if len(open_choices) > MAX_CHOICES:
            raise refused(found[0].path, f"has more than {MAX_CHOICES} choices for one value")
        for member in open_choices[0]:
            self._num_chosen += 1
            if self._num_chosen > MAX_CHOSEN:
                raise refused(member.path, "the choices up to here are too many")
            yield from self._worlds([member], tuple(found), tuple(open_choices[1:]))

    def _check_ends(self, node: Node) -> None:
        outer = node.within
        while outer is not None:
            if outer.schema is node.schema:
                raise refused(node.path, "the schema refers to itself and to nothing else")
            outer = outer.within

    def _check_keywords(self, node: Node) -> None:
        for key, value in list(node.keywords.items()):
            if describes(key, value):
                continue
            if key not in ENFORCED:
                self._unenforced(node, key, "is not enforced")
            elif key in _NEEDS and not node.has(_NEEDS[key]):
                self._unenforced(node, key, f"says nothing without {_NEEDS[key]}")

    def _same_value(self, node: Node) -> Iterator[Node]:
        """What the value must fit as well."""
        if node.has("$ref"):
            reference = node.keywords["$ref"]
            target = resolve(reference, self._root, node.path)
            path = str(reference).replace("#", "$", 1).replace("/", ".")
            yield Node(path, target, node, node.rewritten)
        for i, member in enumerate(node.members("allOf")):
            yield node.beneath(f".allOf[{i}]", member, same_value=True)
        if node.has("not"):
            opposed = self._opposite(node, "not")
            if opposed is None:
                self._unenforced(node, "not", "is not enforced for this schema")
            else:
                yield node.instead("not", opposed)

    def _opposite(self, node: Node, key: str) -> Schema | bool | None:
        schema = node.beneath(f".{key}", node.keywords[key]).schema
        if id(schema) not in self._opposites:
            self._opposites[id(schema)] = opposite(
                schema, partial(resolve, root=self._root, path=node.path)
            )
        return self._opposites[id(schema)]

    def _choices(self, node: Node) -> Iterator[tuple[Node, ...]]:
        """Of each the value must fit one member."""
        if node.has("oneOf"):
            self._check_one_of(node)
        for key in ("anyOf", "oneOf"):
            if node.has(key):
                yield tuple(
                    node.beneath(f".{key}[{i}]", member, same_value=True)
                    for i, member in enumerate(node.members(key))
                )
        if node.has("if"):
            yield from self._condition(node)
        for key in ("dependentRequired", "dependentSchemas"):
            for name, wanted in node.entries(key).items():
                beside = {"required": wanted} if key == "dependentRequired" else wanted
                present: Json = {"allOf": [{"required": [name]}, beside]}
                without: Json = {"properties": {name: False}}
                yield self._made_choice(node, key, name, [without, present])

    def _condition(self, node: Node) -> Iterator[tuple[Node, ...]]:
        if self._opposite(node, "if") is None:
            self._unenforced(node, "if", "is not enforced for this schema")
            for key in ("then", "else"):
                if node.has(key):
                    self._unenforced(node, key, "says nothing without if")
            return
        schema = node.keywords
        holds: Json = {"allOf": [schema["if"], schema.get("then", True)]}
        fails: Json = {"allOf": [{"not": schema["if"]}, schema.get("else", True)]}
        yield self._made_choice(node, "if", "", [holds, fails])

    def _made_choice(
        self, node: Node, key: str, name: str, members: list[Json]
    ) -> tuple[Node, ...]:
        """Made once for each place, so that a schema that recurs is known again."""
        made = self._made.setdefault(
            (id(node.schema), f"{key}.{name}"), [m for m in members if isinstance(m, dict | bool)]
        )
        return tuple(node.instead(key, schema) for schema in made)

    def _check_one_of(self, node: Node) -> None:
        """The grammar of oneOf is that of anyOf: the same only where no value fits two members."""
        members = [
            (node.beneath(f".oneOf[{i}]", member, same_value=True),)
            for i, member in enumerate(node.members("oneOf"))
        ]
        for i, member in enumerate(members):
            if not all(self._comparison.are_disjoint(member, other) for other in members[:i]):
                self._unenforced(
                    node, "oneOf", "may allow what two of its members allow; use anyOf", i
                )
                return

    def _shapes(self, world: World, *, only_meant: bool) -> Iterator[Shape]:
        kinds = self._kinds(world)
        listed = self._listed(world)
        if listed is None:
            for kind in _meant(kinds, world) if only_meant else kinds:
                yield from self._of_kind(kind, world)
            return
        # Values that are listed are written as they are, if they fit what else is said of them.
        of_kind = {kind: list(self._of_kind(kind, world)) for kind in kinds}
        of_kind.setdefault("integer", of_kind.get("number", []))
        kept = tuple(
            value
            for value in listed
            if fits_any(value, of_kind.get(type_of(value), []), self.alternatives)
        )
        if kept:
            yield Values(kept)

    def _of_kind(self, kind: str, world: World) -> Iterator[Shape]:
        if kind == "null":
            yield Values((None,))
        elif kind == "boolean":
            yield Values((False, True))
        elif kind == "string":
            yield from read_string(world, self._unenforced)
        elif kind in ("integer", "number"):
            yield from read_number(world, kind == "integer", self._unenforced)
        elif kind == "array":
            yield from read_array(world, self.alternatives, self._unenforced)
        else:
            yield from read_object(world, self.alternatives, self._unenforced)

    def _kinds(self, world: World) -> list[str]:
        left = [kind for kind in TYPES if kind != "integer"]
        for node in world:
            if not node.has("type"):
                continue
            given = node.members("type") or [node.keywords["type"]]
            if "integer" in given and "number" not in given:
                left = ["integer" if kind == "number" else kind for kind in left]
            left = [
                kind for kind in left if kind in given or (kind == "integer" and "number" in given)
            ]
        return left

    def _listed(self, world: World) -> list[Json] | None:
        """The values that enum and const leave; None: there is neither."""
        listed: list[Json] | None = None
        for node in world:
            for key in ("enum", "const"):
                if not node.has(key):
                    continue
                given = node.members("enum") if key == "enum" else [node.keywords["const"]]
                by_identity = {identity(value): value for value in given}
                if listed is None:
                    listed = list(by_identity.values())
                else:
                    listed = [value for value in listed if identity(value) in by_identity]
        return listed


def _meant(kinds: list[str], world: World) -> list[str]:
    if any(node.has("type") for node in world):
        return kinds
    meant = {kind for node in world for key, kind in KIND_OF.items() if node.has(key)}
    return [kind for kind in kinds if kind in meant] or kinds
