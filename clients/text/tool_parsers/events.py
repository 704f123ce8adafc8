"""What a tool parser says of the text that it reads, in the order of the text.

    Content("Let me look. "), CallStart("get_weather"), ArgumentsDelta('{"city'),
    ArgumentsDelta('": "Paris"}'), CallEnd()

Events between a CallStart and its CallEnd belong to that call. The arguments of one call, joined,
are one JSON value; a call without a CallEnd was cut off, and its arguments with it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments are complete."""


ToolEvent = Content | CallStart | ArgumentsDelta | CallEnd
