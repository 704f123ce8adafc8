"""One choice's text, taken apart into content and tool calls while it streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, structs

from clients.text.tool_parsers import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    Content,
    ToolEvent,
    ToolParser,
)


class CallBegins(Struct, frozen=True):
    index: int  # of the call, by its place in the text
    id: str
    name: str
    arguments: str = ""  # their beginning


class CallGoesOn(Struct, frozen=True):
    index: int
    arguments: str  # what follows


CallDelta = CallBegins | CallGoesOn


class SplitText(Struct, frozen=True):
    content: str
    calls: tuple[CallDelta, ...]


class ToolCallStream:
    def __init__(
        self,
        parser: ToolParser,
        new_call_id: Callable[[], str],
        *,
        is_named: bool,
        is_forced: bool,
        max_calls: int | None,
    ) -> None:
        """`is_named`: the caller knew which call would come. `is_forced`: there is no content;
        what looks like some is a call that was cut before its name was whole. `max_calls`: later
        ones are left out."""
        self._parser = parser
        self._new_call_id = new_call_id
        self._is_named = is_named
        self._is_forced = is_forced
        self._max_calls = max_calls
        self._num_begun = 0
        self._num_complete = 0

    def split(self, text: str, *, is_last: bool) -> SplitText:
        events = self._parser.push(text)
        return self._said(events + self._parser.finish() if is_last else events)

    def finish_reason(self, reason: str) -> str:
        """What the choice ends with, where its text ends with `reason`: a call that is cut off is
        no call that was made."""
        is_whole = self._num_begun == self._num_complete > 0
        return "tool_calls" if reason == "stop" and is_whole and not self._is_named else reason

    def _said(self, events: Sequence[ToolEvent]) -> SplitText:
        content: list[str] = []
        calls: list[CallDelta] = []
        for event in events:
            match event:
                case Content(text):
                    content += [] if self._is_forced else [text]
                case CallStart(name):
                    self._num_begun += 1
                    calls.append(CallBegins(self._index, self._new_call_id(), name))
                case ArgumentsDelta(text):
                    calls.append(CallGoesOn(self._index, text))
                case CallEnd():
                    self._num_complete += 1
        return SplitText("".join(content), tuple(filter(self._counts, _merged(calls))))

    @property
    def _index(self) -> int:
        """Of the call that is being written."""
        return self._num_begun - 1

    def _counts(self, call: CallDelta) -> bool:
        return self._max_calls is None or call.index < self._max_calls


def _merged(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    """One delta for each call."""
    merged: list[CallDelta] = []
    for delta in deltas:
        if merged and merged[-1].index == delta.index:
            last = merged[-1]
            merged[-1] = structs.replace(last, arguments=last.arguments + delta.arguments)
        else:
            merged.append(delta)
    return merged
