"""Stop strings in a stream of text: an exact cut, and nothing withheld without need.

Text is held back only while it is a proper prefix of some stop string: the longest suffix of the
text so far with that property. Every string has its own Knuth-Morris-Pratt matcher:

    text so far   ... t h e   E N |          released | held
    stop          "END"       E N D          the matcher has matched 2 characters, so 2 are held

A matcher is touched only while it has matched something, or at a character that its string begins
with; and its failure table is computed only as far as it ever matched. So a character costs the
same with stop strings of three characters as with several of a megabyte.

The match that ends first wins; of those that end at the same character, the longest. This depends
on the text alone, never on how it was cut into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from clients.text.errors import TextLayerError


@dataclass(frozen=True, slots=True)
class StopResult:
    text: str  # may be sent: it can no longer become part of a stop string
    matched: str | None = None


class StopChecker:
    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        """`include_stop`: the matched string stays at the end of the text."""
        self._include_stop = include_stop
        self._by_first: dict[str, list[_Matcher]] = {}
        if "" in stop:
            raise TextLayerError(f"stop[{list(stop).index('')}] is empty")
        for string in dict.fromkeys(stop):
            self._by_first.setdefault(string[0], []).append(_Matcher(string))
        self._active: list[_Matcher] = []  # those that have matched something
        self._held = _Tail()
        self._matched: str | None = None

    def push(self, text: str, *, honour: bool = True) -> StopResult:
        """With `honour` off, strings that end within `text` do not count as matches, but one that
        begins in it may end in a later piece. After a match, nothing more comes out."""
        if self._matched is not None:
            return StopResult("", self._matched)
        if not self._by_first:
            return StopResult(text)
        for place, character in enumerate(text):
            string = self._advance(character)
            if string is not None and honour:
                self._matched = string
                self._held.append(text[: place + 1])
                dropped = 0 if self._include_stop else len(string)
                return StopResult(self._held.take_all_but(dropped), string)
        self._held.append(text)
        return StopResult(self._held.take_all_but(self._num_held()))

    def finish(self) -> str:
        """The text ends here: what was held back for a stop string that did not come."""
        return "" if self._matched is not None else self._held.take_all_but(0)

    def _num_held(self) -> int:
        return max((matcher.num_matched for matcher in self._active), default=0)

    def _advance(self, character: str) -> str | None:
        """Step every matcher that this character concerns; the longest string that ends here."""
        starting = [
            matcher for matcher in self._by_first.get(character, ()) if not matcher.num_matched
        ]
        if not starting and not self._active:
            return None
        ended: str | None = None
        stepped = self._active + starting
        for matcher in stepped:
            if matcher.step(character) and len(matcher.string) > len(ended or ""):
                ended = matcher.string
        self._active = [matcher for matcher in stepped if matcher.num_matched]
        return ended


class _Matcher:
    """How much of one string the text so far ends with: always less than the whole of it."""

    __slots__ = ("_borders", "num_matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        # _borders[n]: length of the longest proper prefix of string[:n] that is its suffix too
        self._borders = [0, 0]

    def step(self, character: str) -> bool:
        """True: the string ends with this character."""
        while self.num_matched and self.string[self.num_matched] != character:
            self.num_matched = self._border(self.num_matched)
        if self.string[self.num_matched] == character:
            self.num_matched += 1
        if self.num_matched < len(self.string):
            return False
        self.num_matched = self._border(self.num_matched)
        return True

    def _border(self, length: int) -> int:
        borders = self._borders
        while len(borders) <= length:
            character = self.string[len(borders) - 1]
            border = borders[-1]
            while border and self.string[border] != character:
                border = borders[border]
            borders.append(border + (self.string[border] == character))
        return borders[length]


class _Tail:
    """Text that waits to be released, in pieces: adding and taking cost only what they move."""

    def __init__(self) -> None:
        self._pieces: deque[str] = deque()
        self._length = 0

    def append(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._length += len(text)

    def take_all_but(self, num_kept: int) -> str:
        """Take from the front, leaving the last `num_kept` characters."""
        taken = []
        surplus = self._length - num_kept
        while surplus > 0:
            piece = self._pieces.popleft()
            if len(piece) > surplus:
                self._pieces.appendleft(piece[surplus:])
                piece = piece[:surplus]
            taken.append(piece)
            surplus -= len(piece)
        self._length = min(self._length, num_kept)
        return "".join(taken)
