"""Whatever is wrong with messages or template is a ChatTemplateError, and nothing runs for ever."""

from __future__ import annotations

from datetime import datetime
from typing import Any, cast

import pytest

from clients.text import ChatTemplate, ChatTemplateError, chat_template

USER = [{"role": "user", "content": "hi"}]
JOINED = "{% for m in messages %}<{{ m.role + '>' + m.content }}{% endfor %}"


def render(source: str, messages: list[dict[str, Any]] | None = None) -> str:
    return ChatTemplate(source, {}).render(USER if messages is None else messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Only user and assistant') }}", "^Only user and assistant$"),
        ("{{ messages[0].content.a.b }}", "fails on these messages"),
        ("{{ 'x' + messages }}", "fails on these messages"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "sandbox forbids"),
        ("{{ ''.__class__.__mro__ }}{{ lipsum.__globals__.os }}", "sandbox forbids"),
        ("{{ messages | nofilter }}", "not valid Jinja"),
        ("{% include 'other' %}", "fails on these messages"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "too deeply"),
    ],
)
def test_failures_are_typed_and_show_no_internals(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render(source)
    assert "0x" not in caught.value.message
    assert "object at" not in caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(90000) %}{{ 'abcdefghij' * 1000 }}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * [0] }}",
        "{{ 2 ** (10**9) }}",
        "{{ range(10**8) | list }}",
    ],
)
def test_a_huge_template_ends_soon(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CALLS", 150_000)
    with pytest.raises(ChatTemplateError):
        render(source)


def test_the_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", -1.0)
    with pytest.raises(ChatTemplateError, match="too long"):
        render("{% for i in range(3) %}{{ i }}{% endfor %}")


def test_bounds_leave_room_for_long_chats() -> None:
    messages = [{"role": "user", "content": "word " * 100}] * 5000
    source = (
        "{% for m in messages %}{{ m.role.upper().strip() + m.content | trim }}"
        "{% for i in range(3) %}{{ i }}{% endfor %}{% endfor %}"
    )
    assert len(render(source, messages)) == 5000 * (4 + 499 + 3)


def test_messages_must_be_there() -> None:
    with pytest.raises(ChatTemplateError, match="no messages"):
        render(JOINED, [])


@pytest.mark.parametrize("content", [5, ["a"], [{"type": "text", "text": "a"}], {}])
def test_content_that_the_template_cannot_use_is_an_error_not_a_repr(content: object) -> None:
    with pytest.raises(ChatTemplateError):
        render(JOINED, [{"role": "user", "content": content}])


def test_only_json_values_reach_a_template() -> None:
    with pytest.raises(ChatTemplateError, match="JSON values only, not object"):
        render(JOINED, [{"role": "user", "content": object()}])


def test_nesting_without_end_is_an_error() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ChatTemplateError, match="too deeply"):
        render(JOINED, [{"role": "user", "content": deep}])


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_template_arguments_do_not_replace_the_request(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=name):
        ChatTemplate(JOINED, {}).render(USER, template_kwargs={name: []})


def test_template_arguments_and_special_tokens_are_visible() -> None:
    template = ChatTemplate("{{ bos_token }}{{ enable_thinking }}", {"bos_token": "<s>"})
    assert template.render(USER, template_kwargs={"enable_thinking": False}) == "<s>False"
    assert template.render(USER) == "<s>"


def test_a_null_field_is_an_absent_field() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": None}
    assert render("{{ messages[0].content is defined }} {{ messages[0] | length }}", [message]) == (
        "False 1"
    )


def test_the_date() -> None:
    assert render("{{ strftime_now('%Y-%m') }}") == datetime.now().strftime("%Y-%m")


# ---------------------------------------------------------------- continue_final_message

CLOSED = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
TRIMMED = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"


def continued(source: str, content: object, **options: object) -> str:
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": content},
    ]
    return ChatTemplate(source, {}).render(
        messages,
        continue_final_message=True,
        **cast(Any, {"add_generation_prompt": False, **options}),
    )


def test_a_continued_message_stays_open() -> None:
    assert continued(CLOSED, "The answer is ") == "<q><The answer is "
    assert continued(TRIMMED, " The answer is ") == "<q><The answer is"
    assert continued(CLOSED, "") == "<q><"


def test_a_continued_message_of_parts() -> None:
    source = "{% for p in messages[-1].content %}[{{ p.text }}]{% endfor %}!"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert continued(source, parts) == "[a][b"


@pytest.mark.parametrize("content", [None, 5, [], [{"type": "image"}]])
def test_a_message_without_text_cannot_be_continued(content: object) -> None:
    with pytest.raises(ChatTemplateError, match="no text to continue"):
        continued("fixed", content)


def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(ChatTemplateError, match="drops or changes"):
        continued("fixed", "text")


def test_a_prompt_is_either_continued_or_opened() -> None:
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        continued(CLOSED, "text", add_generation_prompt=True)
