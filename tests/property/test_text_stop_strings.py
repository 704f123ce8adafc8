"""The stop checker equals a brute-force reading of the text, however the text is cut."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from clients.text import StopChecker

letters = st.text(alphabet="ab", max_size=12)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)
pieces = st.lists(letters, max_size=6)


def first_match(text: str, stop: Sequence[str], honoured: Sequence[bool]) -> tuple[int, str] | None:
    """(end, string): the match that ends first, the longest of those; `honoured[i]` is about a
    match that ends with character i."""
    for end in range(1, len(text) + 1):
        ending = [string for string in stop if text[:end].endswith(string)]
        if ending and honoured[end - 1]:
            return end, max(ending, key=len)
    return None


def num_held(text: str, stop: Sequence[str]) -> int:
    """The longest suffix of the text that is a proper prefix of a stop string."""
    return max(
        (
            length
            for string in stop
            for length in range(1, len(string))
            if text.endswith(string[:length])
        ),
        default=0,
    )


@settings(max_examples=600)
@given(pieces=pieces, stop=stops, include=st.booleans(), disarmed=st.integers(0, 3))
@example(pieces=["aab", "aab", "aac"], stop=["aabaac"], include=False, disarmed=0)
@example(pieces=["abab"], stop=["b", "abab"], include=False, disarmed=0)
@example(pieces=["ab", "ab"], stop=["abab", "bab"], include=True, disarmed=1)
def test_every_push_equals_the_reference(
    pieces: list[str], stop: list[str], include: bool, disarmed: int
) -> None:
    text = "".join(pieces)
    honoured = [place >= disarmed for place, piece in enumerate(pieces) for _ in piece]
    match = first_match(text, stop, honoured)
    checker = StopChecker(stop, include_stop=include)
    seen = released = ""
    for place, piece in enumerate(pieces):
        result = checker.push(piece, honour=place >= disarmed)
        seen, released = seen + piece, released + result.text
        if match is not None and match[0] <= len(seen):
            end, string = match
            assert result.matched == string
            assert released == text[: end if include else end - len(string)]
        else:
            assert result.matched is None
            assert released == seen[: len(seen) - num_held(seen, stop)]
    rest = checker.finish()
    if match is None:
        assert released + rest == text
    else:
        assert rest == ""


@settings(max_examples=200)
@given(pieces=pieces, stop=stops)
def test_the_cut_does_not_depend_on_the_pieces(pieces: list[str], stop: list[str]) -> None:
    def outcome(chunks: Sequence[str]) -> tuple[str, str | None]:
        checker = StopChecker(stop)
        results = [checker.push(chunk) for chunk in chunks]
        text = "".join(result.text for result in results) + checker.finish()
        return text, results[-1].matched if results else None

    text = "".join(pieces)
    assert outcome(pieces) == outcome(list(text)) == outcome([text] if text else [])
