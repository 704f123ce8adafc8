"""Tool calls in a model's text: how each format is constrained, parsed while it streams, and shown.

One small module per format; `call_parser` reads them all.
"""

from clients.text.tool_parsers.call_parser import ToolParser
from clients.text.tool_parsers.detection import TOOL_FORMATS, detect_tool_format
from clients.text.tool_parsers.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    Content,
    ToolEvent,
)
from clients.text.tool_parsers.format import Tool, ToolFormat, WrittenCall
from clients.text.tool_parsers.generic import tools_as_text

__all__ = [
    "TOOL_FORMATS",
    "ArgumentsDelta",
    "CallEnd",
    "CallStart",
    "Content",
    "Tool",
    "ToolEvent",
    "ToolFormat",
    "ToolParser",
    "WrittenCall",
    "detect_tool_format",
    "tools_as_text",
]
