"""Templates render as transformers renders them: the embedded model's, and ones shaped like those
of other families."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoTokenizer

from clients.text import ChatTemplate, ChatTemplateError, Tokenizer
from tests.text_samples import embedded_tokenizer

LLAMA_3_LIKE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN_LIKE = """{%- macro system_text() %}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + system_text() }}
    {{- "# Tools\\n\\nFunction signatures are within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content | default('', true) %}
        {%- if loop.index0 > ns.last_query_index and reasoning %}
            {{- '<|im_start|>assistant\\n' }}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' }}
        {%- endif %}
        {{- message.content.lstrip('\\n') if message.content is string else '' }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- set given = tool_call.arguments %}
                {{- given if given is string else given | tojson }}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

MISTRAL_LIKE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{% set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- ' [INST] ' }}{% if loop.last and system is defined %}{{ system ~ '\\n\\n' }}{% endif -%}
        {{ message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}"""

# Block trimming, the generation tag's scope, loop controls, the date, odd but real constructs.
CORNERS = """{% set said = "nothing" %}
{% for message in messages %}
  {% if message.role == "system" %}{% continue %}{% endif %}
    {% if loop.index > 40 %}{% break %}{% endif %}
    {% generation %}{% set said = message.role %}
    <{{ message.role | upper }}> {{ message.content }}
    {% endgeneration %}
{% endfor %}
{{ said }} {{ strftime_now("%Y") }} {{ documents is none }} {{ nonexistent }}|{{ pad_token }}|
{{ ["<b>", "é", 1.0, none, true] | tojson }}
{{ {"b": 1, "a": [2]} | tojson(indent=2, sort_keys=true) }}
{{ {"a": 1} | tojson(separators=(",", ":")) }} {{ messages | map(attribute="role") | join(",") }}
{%- for role in dict(a=1) %} {{ role }}{% endfor %}  {# a comment #}
{{ range(3) | list }} {{ "x" * 3 }} {{ 2 ** 10 }} {{ "{}-{}".format("p", 1) }}
"""

TEMPLATES = {
    "embedded": None,
    "llama_3": LLAMA_3_LIKE,
    "qwen": QWEN_LIKE,
    "mistral": MISTRAL_LIKE,
    "corners": CORNERS,
}

Message = dict[str, object]
CALL: Message = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}},
}
CHATS: dict[str, list[Message]] = {
    "user": [{"role": "user", "content": 'Hello <world> & "you" 漢字\n'}],
    "system": [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": "hi", "name": None},
    ],
    "turns": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": " 2 ", "reasoning_content": "easy\n", "refusal": None},
        {"role": "user", "content": ""},
    ],
    "reasoning_last": [
        {"role": "user", "content": "hm"},
        {"role": "assistant", "content": "\nyes", "reasoning": "as asked"},
    ],
    "wrong_order": [
        {"role": "assistant", "content": "first"},
        {"role": "assistant", "content": "second"},
    ],
    "tools_used": [
        {"role": "system", "content": "You have tools."},
        {"role": "user", "content": "Weather in Zürich?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        {"role": "tool", "content": "<warm>", "tool_call_id": "call_1"},
    ],
    "no_content": [{"role": "user"}],
    "content_list": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}],
}
TOOLS: list[dict[str, object]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's <the> weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {"add_generation_prompt": True},
    "closed": {"add_generation_prompt": False},
    "tools": {"add_generation_prompt": True, "tools": TOOLS},
    "kwargs": {"add_generation_prompt": True, "enable_thinking": False, "date_string": "today"},
    "bos": {"add_generation_prompt": True, "bos_token": "<other>"},
    "continue": {"add_generation_prompt": False, "continue_final_message": True},
}


@pytest.fixture(scope="module")
def reference(embedded_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(embedded_model_dir)


@pytest.fixture(scope="module")
def own(embedded_model_dir: Path) -> Tokenizer:
    return embedded_tokenizer(embedded_model_dir)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
@pytest.mark.parametrize("name", TEMPLATES.keys())
def test_rendering_equals_transformers(
    name: str,
    chat: list[Message],
    options: dict[str, object],
    reference: Any,
    own: Tokenizer,
) -> None:
    source = TEMPLATES[name]
    template = own.chat_template if source is None else ChatTemplate(source, own.special_tokens)
    assert template is not None
    before = copy.deepcopy(chat)

    try:
        expected = reference.apply_chat_template(
            chat, chat_template=source, tokenize=False, **options
        )
    except Exception:
        expected = None
    known = dict(options)
    call = {
        "tools": known.pop("tools", None),
        "add_generation_prompt": known.pop("add_generation_prompt"),
        "continue_final_message": known.pop("continue_final_message", False),
    }
    try:
        rendered = template.render(chat, template_kwargs=known, **cast(Any, call))
    except ChatTemplateError:
        rendered = None
    assert rendered == expected
    assert chat == before


def test_the_comparison_has_both_outcomes(own: Tokenizer) -> None:
    """The Mistral-like template refuses a wrong order in its own words, and accepts a right one."""
    template = ChatTemplate(MISTRAL_LIKE, own.special_tokens)
    assert template.render(CHATS["user"]).endswith(" [/INST]")
    with pytest.raises(ChatTemplateError, match=r"^Conversation roles must alternate"):
        template.render(CHATS["wrong_order"])


def test_special_tokens_equal_transformers(reference: Any, own: Tokenizer) -> None:
    assert dict(own.special_tokens) == reference.special_tokens_map


def test_the_prompt_ids_equal_transformers(reference: Any, own: Tokenizer) -> None:
    assert own.chat_template is not None
    rendered = own.chat_template.render(CHATS["turns"])
    expected = reference.apply_chat_template(CHATS["turns"], add_generation_prompt=True)
    assert own.encode(rendered, add_special_tokens=False) == expected["input_ids"]
