"""The model's own chat template, rendered as transformers renders it, without torch.

A template comes with the model's weights and is trusted as they are; the sandbox keeps it from the
interpreter's internals all the same. The messages come from anyone: whatever goes wrong while they
are rendered, by the template's own choice (`raise_exception`) or not, is a ChatTemplateError. What
is cheap to bound is bounded, so that no template and no message hold a thread for ever: the number
of calls and of `range` items, the time, the length of the output and of repeated sequences.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from clients.text.errors import ChatTemplateError

MAX_CALLS = 1_000_000  # calls and items of `range`, per render
MAX_SECONDS = 30.0
MAX_OUTPUT_CHARACTERS = 1 << 26
MAX_POWER_BITS = 4096  # of the result of **

_RESERVED = ("messages", "tools", "add_generation_prompt")
_BUDGET = "_render_budget"
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # the first is the standard one
# Where a continued message ends. Its last space tells whether the template strips its messages.
_CONTINUES_HERE = "THE-FINAL-MESSAGE-CONTINUES-HERE "


class ChatTemplate:
    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        source_with_tools: str | None = None,
    ) -> None:
        """`special_tokens` are visible to the template by their names (`bos_token`, ...).
        Some models have a second template for requests with tools: `source_with_tools`."""
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, LoopControlExtension],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self.source_with_tools = source if source_with_tools is None else source_with_tools
        self._special_tokens = dict(special_tokens)
        self._template = _compile(environment, source)
        self._template_with_tools = (
            self._template
            if source_with_tools is None
            else _compile(environment, source_with_tools)
        )
        self.takes_tools = "tools" in meta.find_undeclared_variables(
            environment.parse(self.source_with_tools)
        )

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] = {},
    ) -> str:
        """The prompt's text, whose special tokens are in it: encode it with
        `add_special_tokens=False`. Changes none of its arguments."""
        if not messages:
            raise ChatTemplateError("there are no messages")
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message and add_generation_prompt exclude each other"
            )
        for name in (*_RESERVED, _BUDGET):
            if name in template_kwargs:
                raise ChatTemplateError(f"{name} cannot be given as a template argument")
        try:
            chat = [_prepared(message) for message in messages]
            final_text = _mark_final_message(chat[-1]) if continue_final_message else ""
            variables = {
                "documents": None,
                **self._special_tokens,
                **{name: _plain(value) for name, value in template_kwargs.items()},
                "messages": chat,
                "tools": None if tools is None else [_plain(tool) for tool in tools],
                "add_generation_prompt": add_generation_prompt,
            }
            rendered = _render(
                self._template if tools is None else self._template_with_tools, variables
            )
        except RecursionError as error:
            raise ChatTemplateError(
                "the chat template or its input is nested too deeply"
            ) from error
        return _cut_at_mark(rendered, final_text) if continue_final_message else rendered


# ---------------------------------------------------------------- rendering


class _Budget:
    """What one render may still spend."""

    def __init__(self) -> None:
        self._calls = MAX_CALLS
        self._characters = MAX_OUTPUT_CHARACTERS
        self._end = time.monotonic() + MAX_SECONDS

    def spend(self, *, calls: int = 0, characters: int = 0) -> None:
        self._calls -= calls
        self._characters -= characters
        if self._calls < 0 or self._characters < 0 or time.monotonic() > self._end:
            raise ChatTemplateError("the chat template takes too long or writes too much")


def _render(template: jinja2.Template, variables: dict[str, object]) -> str:
    budget = _Budget()
    pieces = []
    try:
        for piece in template.generate({**variables, _BUDGET: budget}):
            budget.spend(characters=len(piece))
            pieces.append(piece)
    except (ChatTemplateError, RecursionError):
        raise
    except _Refusal as error:
        raise ChatTemplateError(str(error)) from error
    except SecurityError as error:  # its message may show an object's repr
        raise ChatTemplateError("the chat template does what the sandbox forbids") from error
    except Exception as error:  # a template may fail in any way that an expression can
        raise ChatTemplateError(f"the chat template fails on these messages: {error}") from error
    return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a price on what can make a template run long."""

    intercepted_binops = frozenset({"*", "**"})

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Jinja's own signature: every call in a template, its macros and `range` included.
        budget: _Budget = __context.parent[_BUDGET]
        budget.spend(calls=1)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, range):
            budget.spend(calls=len(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    context.parent[_BUDGET].spend(characters=len(sequence) * max(count, 0))
        elif (
            isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * right > MAX_POWER_BITS
        ):
            raise ChatTemplateError("the chat template computes too large a number")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training. Here it
    is only a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Refusal(jinja2.TemplateError):
    """The template refuses the messages, in its own words."""


def _raise_exception(message: object) -> str:
    raise _Refusal(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter of this name escapes for HTML, which a model never saw in training."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _compile(environment: jinja2.Environment, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
        ) from error
    except RecursionError as error:
        raise ChatTemplateError("the chat template is nested too deeply") from error


# ---------------------------------------------------------------- messages


def _prepared(message: Mapping[str, object]) -> dict[str, object]:
    """A copy that a template understands: a null field is an absent one (templates print "None"),
    and reasoning stands under every name that templates read it by."""
    present = {name: _plain(value) for name, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING_NAMES if name in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _plain(value: object) -> object:
    """A deep copy made of JSON's types only, so that a template never meets an object's methods."""
    if value is None or isinstance(value, str | int | float):  # bool is an int
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise ChatTemplateError(f"a chat template takes JSON values only, not {type(value).__name__}")


def _mark_final_message(message: dict[str, object]) -> str:
    """Put the mark at the end of the message's text; returns the text without it."""
    content = message.get("content")
    holder, name = message, "content"
    if isinstance(content, list):
        for part in reversed(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                holder, name = part, "text"
                break
    text = holder.get(name)
    if not isinstance(text, str):
        raise ChatTemplateError("continue_final_message: the final message has no text to continue")
    holder[name] = text + _CONTINUES_HERE
    return text


def _cut_at_mark(rendered: str, final_text: str) -> str:
    place = rendered.rfind(_CONTINUES_HERE.strip())
    if place < 0 or final_text.strip() not in rendered:
        raise ChatTemplateError(
            "continue_final_message: the chat template drops or changes the final message"
        )
    if rendered.startswith(_CONTINUES_HERE, place):
        return rendered[:place]
    # The template strips its messages: what follows the stripped text is not part of the prompt.
    return rendered[:place].rstrip()
