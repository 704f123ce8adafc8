"""What every tool-call format can say of itself, and what it is told of tools and calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from clients.text.tool_parsers.call_parser import ToolParser

JsonObject = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: JsonObject  # a JSON Schema of the arguments
    relax_unenforced: bool = False  # drop what of the schema can't be enforced


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call of the conversation so far."""

    name: str
    arguments: str  # JSON


class ToolFormat(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def marker(self) -> str:
        """What begins calls; some vocabularies have it as a special token, which the parser must
        see like other text. Empty: nothing that could be one."""
        ...

    @property
    def example(self) -> str:
        """A call, for a text that tells the model how to write one."""
        ...

    def new_call_id(self) -> str:
        """Unique, and such as the format's templates take."""
        ...

    def parser(self, names: Collection[str]) -> ToolParser: ...

    def structural_tag(
        self, tools: Sequence[Tool], *, is_forced: bool, parallel: bool
    ) -> JsonObject:
        """The document that constrains a whole answer: to calls only (`is_forced`), or to any text
        in which a call, once it begins, is one of these tools'. Not `parallel`: at most one."""
        ...

    def write(self, calls: Sequence[WrittenCall]) -> str:
        """As the model would have written them."""
        ...
