"""What one request has said so far, kept as it grows: the penalties' memory.

    token_ids      [ 17, 4, 901, ... ]     distinct, in the order of their first appearance
    output_counts  [  0, 3,   1, ... ]     how often each was generated; 0: in the prompt only

A token more costs the same whatever came before, so a step never counts a text again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenCounts:
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    output_counts: array[int] = field(default_factory=lambda: array("q"))
    _places: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of_prompt(cls, token_ids: Iterable[int]) -> TokenCounts:
        distinct = array("q", dict.fromkeys(token_ids))
        places = {token_id: place for place, token_id in enumerate(distinct)}
        return cls(distinct, array("q", bytes(8 * len(distinct))), places)

    def add(self, token_id: int) -> None:
        """One generated token."""
        place = self._places.setdefault(token_id, len(self.token_ids))
        if place == len(self.token_ids):
            self.token_ids.append(token_id)
            self.output_counts.append(0)
        self.output_counts[place] += 1
