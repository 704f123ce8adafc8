"""Whether an answer's thought is told apart from its content, and under which names it is sent.

A grammar holds from an answer's first token on. So one that is asked for of the answer is given to
the engine as what follows the thought, unless the prompt has closed that:

    qwen3         (<think> any text </think> \\n\\n)? grammar
    inside already         any text </think> \\n\\n grammar
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from clients.text.reasoning import (
    REASONING_FORMATS,
    PromptThought,
    ReasoningFormat,
    ReasoningParser,
    detect_reasoning_format,
)
from clients.text.tokenizer import Tokenizer
from clients.text.tool_parsers import documents
from clients.text.tool_parsers.format import JsonObject
from clients.types import StructuredOutput
from http_facade.constraints import Constraint
from http_facade.flags import AUTO_PARSER, BOTH_REASONING_FIELDS, FacadeConfig
from http_facade.schema import ChatRequest, Message

# what clients read thoughts by: the newer name, and the one that DeepSeek's API began with
_FIELDS = ("reasoning", "reasoning_content")
_BEHIND_THOUGHT: JsonObject = {"type": "regex", "pattern": r"\n{0,2}"}
_ROOT = "$.format"  # where a structural tag's own format stands


@dataclass(frozen=True, slots=True)
class ReasoningSettings:
    """Of one model behind this facade."""

    format: ReasoningFormat
    fields: tuple[str, ...]  # of a message

    @classmethod
    def of(cls, config: FacadeConfig, tokenizer: Tokenizer) -> ReasoningSettings | None:
        """None: all text is content."""
        if config.reasoning_parser == AUTO_PARSER:
            found = detect_reasoning_format(tokenizer.chat_template)
        else:
            found = REASONING_FORMATS.get(config.reasoning_parser)
        if found is None:
            return None
        is_both = config.reasoning_field == BOTH_REASONING_FIELDS
        return cls(found, _FIELDS if is_both else (config.reasoning_field,))


@dataclass(frozen=True, slots=True)
class ReasoningPlan:
    """Of one request."""

    format: ReasoningFormat
    continued: str  # the message that the answer goes on, where it goes on one
    waits: bool  # the constraint leaves no room for a thought: it must begin behind it

    @property
    def tags(self) -> tuple[str, str]:
        return self.format.start, self.format.end

    def parser(self, prompt: str) -> ReasoningParser:
        return self.format.parser(self._at_end(prompt))

    def constraint(self, asked: Constraint | None, prompt: str) -> Constraint | None:
        """What is asked of the answer, as what is asked of its thought and content together."""
        at_end = self._at_end(prompt)
        if asked is None or not self.waits or at_end is PromptThought.CLOSED:
            return asked
        return _behind_thought(asked, self.format, at_end)

    def _at_end(self, prompt: str) -> PromptThought:
        return self.format.thought_at_end(prompt, self.continued)


def plan_reasoning(
    request: ChatRequest, settings: ReasoningSettings | None, *, is_constrained: bool
) -> ReasoningPlan | None:
    """None: all text is content. `is_constrained`: a grammar leaves no room for a thought."""
    if settings is None:
        return None
    continued = _text(request.messages[-1]) if request.continue_final_message else ""
    return ReasoningPlan(settings.format, continued, is_constrained)


def _text(message: Message) -> str:
    content = message.content or ""
    if isinstance(content, str):
        return content
    return "".join(part.text or "" for part in content)


# ---------------------------------------------------------------- constraints


def _behind_thought(
    asked: Constraint, format: ReasoningFormat, at_end: PromptThought
) -> Constraint:
    try:
        own = _own_format(asked.output)
    except msgspec.DecodeError:
        return asked  # no structural tag: the engine says so, and better
    is_inside = at_end is PromptThought.OPEN or format.begins_inside
    tag = documents.tag("" if is_inside else format.start, {"type": "any_text"}, format.end)
    thought = documents.in_sequence([tag, _BEHIND_THOUGHT])
    if not is_inside:
        thought = {"type": "optional", "content": thought}
    root = f"{_ROOT}.elements[1]"
    document = documents.nothing_else(documents.in_sequence([thought, own.node]))
    text = msgspec.json.encode(document).decode()
    output = StructuredOutput(structural_tag=text, relax_unenforced=asked.output.relax_unenforced)
    places = tuple((root + place.removeprefix(_ROOT), param) for place, param in asked.places)
    here = (root + own.place, asked.param + own.param)
    return replace(asked, output=output, places=(*places, here))


class _StructuralTag(msgspec.Struct):
    format: msgspec.Raw


@dataclass(frozen=True, slots=True)
class _OwnFormat:
    """A constraint as a structural tag's format."""

    node: object
    place: str = ""  # where in it the caller's source stands
    param: str = ""  # where in the caller's source this is


def _own_format(output: StructuredOutput) -> _OwnFormat:
    if output.structural_tag is not None:
        tag = msgspec.json.decode(output.structural_tag, type=_StructuralTag)
        return _OwnFormat(tag.format, param=".format")
    if output.regex is not None:
        return _OwnFormat({"type": "regex", "pattern": output.regex}, ".pattern")
    if output.grammar is not None:
        return _OwnFormat({"type": "grammar", "grammar": output.grammar}, ".grammar")
    if output.choice:
        texts = [{"type": "const_string", "value": value} for value in output.choice]
        return _OwnFormat(documents.one_of(texts))
    schema: object = {"type": "object"}
    if output.json_schema is not None:
        schema = msgspec.Raw(output.json_schema.encode())
    return _OwnFormat({"type": "json_schema", "json_schema": schema}, ".json_schema")
