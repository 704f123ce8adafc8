"""The thought at the beginning of an answer, told apart from what the answer says.

    <think>\\n Let me see. \\n</think>\\n\\n Paris.
    |tag      |thought       |tag           |content

- A thought stands at the beginning of an answer or nowhere: what comes later is content, tags
  included. The prompt may have opened it already, or closed it.
- Spaces and line ends around the tags belong to neither and are dropped, but for those before an
  answer without a thought, and at the end of a thought that is cut off.
- What was told is never taken back. Text is held back only while it may still become a tag, or be
  dropped with it.

Where the pieces of the text are cut has no influence on what is told, joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from clients.text.chat_template import ChatTemplate

_SPACES: Final = " \t\r\n"
_START: Final = "<think>"
_END: Final = "</think>"
_MAX_END_CHARS: Final = 100  # of a prompt: a tag, and spaces behind it


class PromptThought(Enum):
    """Where a prompt leaves the thought of the answer that follows it."""

    NONE = "none"  # not begun
    OPEN = "open"
    CLOSED = "closed"  # there will be none


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    begins_inside: bool  # an answer without a tag begins with a thought all the same
    start: str = _START
    end: str = _END

    def parser(self, prompt: PromptThought) -> ReasoningParser:
        return ReasoningParser(self, prompt)

    def thought_at_end(self, prompt: str, continued: str = "") -> PromptThought:
        """`continued`: the text of the message that the prompt ends with and the answer goes on."""
        end = prompt[-_MAX_END_CHARS:].rstrip(_SPACES)
        if end.endswith(self.start):
            return PromptThought.OPEN
        if end.endswith(self.end):
            return PromptThought.CLOSED
        opened, closed = continued.rfind(self.start), continued.rfind(self.end)
        if opened == closed:  # neither is there
            return PromptThought.CLOSED if continued else PromptThought.NONE
        return PromptThought.OPEN if opened > closed else PromptThought.CLOSED


REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        one.name: one
        for one in (
            ReasoningFormat("qwen3", begins_inside=False),
            ReasoningFormat("deepseek_r1", begins_inside=True),
        )
    }
)


def detect_reasoning_format(template: ChatTemplate | None) -> ReasoningFormat | None:
    """As the model's chat template shows it; None: the model writes no thoughts."""
    source = "" if template is None else template.source
    if _END not in source:
        return None
    is_deepseek = "<｜Assistant｜>" in source or _START not in source
    return REASONING_FORMATS["deepseek_r1" if is_deepseek else "qwen3"]


@dataclass(frozen=True, slots=True)
class SplitThought:
    thought: str
    content: str


class _Stage(Enum):
    BEFORE = 0  # a start tag may come, or the rest of one; no text that counts was there
    INSIDE = 1
    BEHIND = 2  # the end tag was there, and no content yet
    CONTENT = 3


class ReasoningParser:
    """Reads the text of one sample."""

    def __init__(self, format: ReasoningFormat, prompt: PromptThought) -> None:
        self._format = format
        self._without_tag = (
            _Stage.INSIDE
            if prompt is PromptThought.OPEN or format.begins_inside
            else _Stage.CONTENT
        )
        is_closed = prompt is PromptThought.CLOSED
        self._stage = _Stage.CONTENT if is_closed else _Stage.BEFORE
        self._held = ""
        self._has_said = False  # something of the thought
        self.num_passed = 0  # characters so far that neither are content nor held back

    @property
    def in_thought(self) -> bool:
        """It has begun, and has not ended."""
        return self._stage is _Stage.INSIDE

    @property
    def is_content(self) -> bool:
        """All that comes now is content."""
        return self._stage is _Stage.CONTENT

    def push(self, text: str) -> SplitThought:
        """What is known now; pieces may have any length."""
        if self._stage is _Stage.CONTENT:
            return SplitThought("", text)
        text, self._held = self._held + text, ""
        num_before = len(text)
        thought = ""
        if self._stage is _Stage.BEFORE:
            text = self._read_start(text)
        if self._stage is _Stage.INSIDE:
            thought, text = self._read_inside(text)
        if self._stage is _Stage.BEHIND:
            text = text.lstrip(_SPACES)
            if text:
                self._stage = _Stage.CONTENT
        content = text if self._stage is _Stage.CONTENT else ""
        self.num_passed += num_before - len(content) - len(self._held)
        return SplitThought(thought, content)

    def finish(self) -> SplitThought:
        """The text ends here: what was held back."""
        held, self._held = self._held, ""
        if self._stage is _Stage.BEFORE and self._without_tag is _Stage.CONTENT:
            return SplitThought("", held)
        self.num_passed += len(held)
        return SplitThought(held if self._has_said else held.lstrip(_SPACES), "")

    def _read_start(self, text: str) -> str:
        """Returns what the next stage reads."""
        start = self._format.start
        stripped = text.lstrip(_SPACES)
        if stripped.startswith(start):
            self._stage = _Stage.INSIDE
            return stripped[len(start) :]
        if start.startswith(stripped):
            self._held = text
            return ""
        self._stage = self._without_tag
        return text

    def _read_inside(self, text: str) -> tuple[str, str]:
        """The thought, and what is behind it."""
        end = self._format.end
        if not self._has_said:
            text = text.lstrip(_SPACES)
        place = text.find(end)
        if place >= 0:
            self._stage = _Stage.BEHIND
            return text[:place].rstrip(_SPACES), text[place + len(end) :]
        certain = text[: len(text) - _num_begun(text, end)].rstrip(_SPACES)
        self._held = text[len(certain) :]
        self._has_said = self._has_said or bool(certain)
        return certain, ""


def _num_begun(text: str, tag: str) -> int:
    """Of how many characters the longest end of the text is that the tag begins with."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
