"""Where a thought ends and the answer begins."""

from __future__ import annotations

import pytest

from clients.text.chat_template import ChatTemplate
from clients.text.reasoning import (
    REASONING_FORMATS,
    PromptThought,
    SplitThought,
    detect_reasoning_format,
)
from http_facade.flags import REASONING_PARSERS

NONE, OPEN, CLOSED = PromptThought.NONE, PromptThought.OPEN, PromptThought.CLOSED
QWEN, DEEPSEEK = REASONING_FORMATS["qwen3"], REASONING_FORMATS["deepseek_r1"]


def split(name: str, prompt: PromptThought, *pieces: str) -> tuple[str, str]:
    parser = REASONING_FORMATS[name].parser(prompt)
    parts = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(part.thought for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("name", "prompt", "text", "thought", "content"),
    [
        ("qwen3", NONE, "<think>\nI see.\n</think>\n\nYes.", "I see.", "Yes."),
        ("qwen3", NONE, " \n<think>I see.</think>Yes.", "I see.", "Yes."),
        ("qwen3", NONE, "<think></think>Yes.", "", "Yes."),
        ("qwen3", NONE, "<think>\n\n</think>\n\nYes.\n", "", "Yes.\n"),
        ("qwen3", NONE, "  Yes.", "", "  Yes."),
        ("qwen3", NONE, "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
        ("qwen3", NONE, "<thin", "", "<thin"),
        ("qwen3", NONE, "</think>Yes.", "", "</think>Yes."),
        ("qwen3", NONE, "", "", ""),
        ("qwen3", NONE, " \n", "", " \n"),
        ("qwen3", OPEN, "\nI see.\n</think>\nYes.", "I see.", "Yes."),
        ("qwen3", OPEN, "<think>I see.</think>Yes.", "I see.", "Yes."),
        ("qwen3", OPEN, "I see</think", "I see</think", ""),
        ("qwen3", OPEN, "I see </thin>k", "I see </thin>k", ""),
        ("qwen3", OPEN, "I see.\n", "I see.\n", ""),
        ("qwen3", OPEN, "a</think>b</think>c", "a", "b</think>c"),
        ("qwen3", CLOSED, "<think>a</think>b", "", "<think>a</think>b"),
        ("deepseek_r1", NONE, "I see.</think>Yes.", "I see.", "Yes."),
        ("deepseek_r1", NONE, "<think>\nI see.</think>Yes.", "I see.", "Yes."),
        ("deepseek_r1", NONE, "I see.", "I see.", ""),
        ("deepseek_r1", NONE, "<thi", "<thi", ""),
        ("deepseek_r1", CLOSED, "Yes.", "", "Yes."),
    ],
)
def test_thought_and_content_wherever_the_text_is_cut(
    name: str, prompt: PromptThought, text: str, thought: str, content: str
) -> None:
    assert split(name, prompt, text) == (thought, content)
    assert split(name, prompt, *text) == (thought, content)
    for place in range(len(text) + 1):
        assert split(name, prompt, text[:place], text[place:]) == (thought, content)


def test_only_what_may_become_a_tag_is_held_back() -> None:
    parser = QWEN.parser(OPEN)
    assert parser.push("a < b") == SplitThought("a < b", "")
    assert parser.push(" </thi") == SplitThought("", "")
    assert parser.push("s") == SplitThought(" </this", "")
    assert parser.num_passed == len("a < b </this")
    assert parser.push("</think>\n") == SplitThought("", "") and not parser.in_thought
    assert parser.push("\nc </think") == SplitThought("", "c </think")
    assert parser.num_passed == len("a < b </this</think>\n\n")


@pytest.mark.parametrize(
    ("prompt", "continued", "expected"),
    [
        ("<|im_start|>assistant\n", "", NONE),
        ("<|im_start|>assistant\n<think>\n", "", OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", CLOSED),
        # what a user writes is no tag of the answer
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", "", NONE),
        ("<|im_start|>assistant\n<think>\nLet me", "<think>\nLet me", OPEN),
        ("<|im_start|>assistant\n<think>a</think>b", "<think>a</think>b", CLOSED),
        ("<|im_start|>assistant\nThe answer", "The answer", CLOSED),
    ],
)
def test_where_a_prompt_leaves_the_thought(
    prompt: str, continued: str, expected: PromptThought
) -> None:
    assert QWEN.thought_at_end(prompt, continued) is expected


def test_the_flags_choices_are_the_formats_there_are() -> None:
    assert set(REASONING_PARSERS) == {"auto", "none", *REASONING_FORMATS}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (None, None),
        ("{{ messages[0].content }}", None),
        ("{{ '<think>\\n' + reasoning_content + '\\n</think>' }}", "qwen3"),
        ("{{ content.split('</think>')[-1] }}", "deepseek_r1"),
        ("{{ content.split('</think>')[-1] }}{{ '<｜Assistant｜><think>\\n' }}", "deepseek_r1"),
    ],
)
def test_the_format_is_read_off_the_template(source: str | None, name: str | None) -> None:
    found = detect_reasoning_format(None if source is None else ChatTemplate(source, {}))
    assert (None if found is None else found.name) == name
