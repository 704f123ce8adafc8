"""Exact cuts and minimal hold-back, at a cost that the stop strings do not set."""

from __future__ import annotations

import time

import pytest

from clients.text import StopChecker, StopResult, TextLayerError


def test_no_piece_of_a_match_comes_out() -> None:
    checker = StopChecker(["DEFGHIJ"])
    results = [checker.push(letter) for letter in "ABCDEFGHIJK"]
    assert [result.text for result in results] == ["A", "B", "C"] + [""] * 8
    assert [result.matched for result in results] == [None] * 9 + ["DEFGHIJ"] * 2
    assert checker.finish() == ""


def test_the_cut_inside_a_piece() -> None:
    assert StopChecker(["DEF"]).push("ABCDEFGH") == StopResult("ABC", "DEF")
    assert StopChecker(["DEF"], include_stop=True).push("ABCDEFGH") == StopResult("ABCDEF", "DEF")


def test_only_a_proper_prefix_is_held_and_comes_out_once_it_fails() -> None:
    checker = StopChecker(["\n\nUser:", "END"])
    pushed = ["one\n", "two\n\n", "Us", "ually EN", "EN", "D"]
    assert [checker.push(piece).text for piece in pushed] == [
        "one",
        "\ntwo",
        "",
        "\n\nUsually ",
        "EN",
        "",
    ]


def test_what_is_held_at_the_end_comes_out() -> None:
    checker = StopChecker(["END"])
    assert checker.push("the EN").text == "the "
    assert checker.finish() == "EN"
    assert checker.finish() == ""


def test_a_stop_string_that_never_begins_delays_nothing() -> None:
    checker = StopChecker(["q" * 200])
    for piece in ("The ", "weather", " is fine", "."):
        assert checker.push(piece).text == piece


@pytest.mark.parametrize(
    ("stop", "matched", "text"),
    [
        (["ABCDE", "CD"], "CD", "xAB"),  # the one that ends first, though it begins later
        (["BCD", "CD", "D"], "BCD", "xA"),  # of those that end together, the longest
        (["CD", "CDE"], "CD", "xAB"),
    ],
)
def test_ties(stop: list[str], matched: str, text: str) -> None:
    for order in (stop, stop[::-1]):
        assert StopChecker(order).push("xABCDE") == StopResult(text, matched)


def test_a_match_that_is_not_honoured_goes_on_as_text() -> None:
    checker = StopChecker(["aba"])
    assert checker.push("xaba", honour=False) == StopResult("xab", None)
    assert checker.push("ba") == StopResult("", "aba")  # overlaps the one before


def test_no_stop_strings() -> None:
    checker = StopChecker([])
    assert checker.push("text") == StopResult("text", None)
    assert checker.finish() == ""


def test_an_empty_stop_string_is_refused_by_its_place() -> None:
    with pytest.raises(TextLayerError, match=r"stop\[1\] is empty"):
        StopChecker(["a", ""])


def test_huge_stop_strings_cost_what_small_ones_cost() -> None:
    """A table of a megabyte's failures would take about a second; four of them, built at each
    request, would stop the event loop."""
    huge = ["ab" * 500_000, "ba" * 500_000, "a" * 1_000_000, "abb" * 350_000]
    begin = time.thread_time()
    checker = StopChecker(huge)
    pieces = ["the ab", "ababab", "abba", "aaaa", "xyz"] * 400
    out = "".join(checker.push(piece).text for piece in pieces) + checker.finish()
    assert time.thread_time() - begin < 0.5
    assert out == "".join(pieces)


def test_holding_a_long_text_costs_no_more_per_piece() -> None:
    checker = StopChecker(["q" * 1_000_000])
    begin = time.thread_time()
    for _ in range(50_000):
        assert checker.push("qqqq").text == ""
    assert checker.push("x").text == "q" * 200_000 + "x"
    assert time.thread_time() - begin < 5  # copying what is held at each piece takes minutes
