"""Which format a model writes its calls in, told from its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from clients.text.chat_template import ChatTemplate
from clients.text.tool_parsers.format import ToolFormat
from clients.text.tool_parsers.generic import Generic
from clients.text.tool_parsers.hermes import Hermes
from clients.text.tool_parsers.llama3_json import Llama3Json
from clients.text.tool_parsers.mistral import Mistral
from clients.text.tool_parsers.mistral_v11 import MistralV11
from clients.text.tool_parsers.pythonic import Pythonic

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        one.name: one
        for one in (Hermes(), Llama3Json(), Mistral(), MistralV11(), Pythonic(), Generic())
    }
)


@dataclass(frozen=True, slots=True)
class _Sign:
    """What only the templates of a format say."""

    name: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    def is_in(self, text: str) -> bool:
        return all(one in text for one in self.has) and not any(one in text for one in self.lacks)


# The first that is found counts.
_SIGNS: Final = (
    _Sign("mistral_v11", ("[TOOL_CALLS]", "[ARGS]")),
    _Sign("mistral", ("[TOOL_CALLS]",)),
    # some put another syntax between these marks
    _Sign("hermes", ("<tool_call>", "arguments"), lacks=("<function=", "<arg_key>")),
    _Sign("pythonic", ("func_name1(",)),
    _Sign("llama3_json", ('{"name": ', '"parameters": ')),
)


def detect_tool_format(template: ChatTemplate | None) -> ToolFormat:
    """The generic one where there is no template, or one that takes no tools or shows calls in a
    way that is not known here."""
    if template is not None and template.takes_tools:
        text = template.source_with_tools.replace("\\", "")  # quotes may be escaped
        for sign in _SIGNS:
            if sign.is_in(text):
                return TOOL_FORMATS[sign.name]
    return TOOL_FORMATS["generic"]
