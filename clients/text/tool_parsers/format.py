"""What every tool-call format can say of itself, and what it is told of tools and calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from clients.text.tool_parsers.call_parser import ToolParser

JsonObject = Mapping[str, object]
NO_IDS: Final[Mapping[str, int]] = MappingProxyType({})


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
    def markers(self) -> tuple[str, ...]:
        """What stands around calls and may be special tokens of a vocabulary, which the parser must
        see like other text."""
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
        self,
        tools: Sequence[Tool],
        *,
        is_forced: bool,
        parallel: bool,
        special_ids: Mapping[str, int] = NO_IDS,
    ) -> JsonObject:
        """The document that constrains a whole answer: to calls only (`is_forced`), or to any text
        in which a call, once it begins, is one of these tools'. Not `parallel`: at most one.
        `special_ids`: of those markers that are special tokens of the model's vocabulary."""
        ...

    def write(self, calls: Sequence[WrittenCall]) -> str:
        """As the model would have written them."""
        ...
