"""From a request's messages or prompts to token ids.

Long texts are rendered and encoded in a thread, so that other requests' tokens keep flowing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from opentelemetry.trace import Tracer

from clients.text.chat_template import ChatTemplate
from clients.text.errors import ChatTemplateError, InvalidText
from clients.text.tokenizer import Tokenizer
from clients.text.tool_parsers import ToolFormat, tools_as_text
from clients.text.tool_parsers.format import JsonObject
from clients.types import ModelInfo
from http_facade.errors import context_length_exceeded, invalid
from http_facade.messages import num_chars_of, template_messages
from http_facade.off_loop import INLINE_CHARS, run_by_size
from http_facade.schema import MAX_CHOICES, ChatRequest, CompletionRequest, GenerationFields
from http_facade.tools import template_tools
from http_facade.tracing import describe_first_message
from traces import names
from traces.stages import stage

_CHARS_PER_MESSAGE = 100  # what one without a text costs, in characters of text

# what the facade itself passes to a template
_RESERVED_TEMPLATE_KWARGS = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message")
)


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: Sequence[int]
    text: str = ""  # of a chat: what the template made; else what echo shows again
    hidden_token_ids: frozenset[int] = frozenset()  # special ones that the text doesn't show


# ---------------------------------------------------------------- chat


async def chat_text(
    request: ChatRequest, tokenizer: Tokenizer, tracer: Tracer, *, tool_format: ToolFormat
) -> str:
    """What the model's template makes of the messages. Raises ApiError."""
    template = tokenizer.chat_template
    if template is None:
        raise invalid("messages", "the model has no chat template: use /v1/completions")
    with stage(tracer, names.SPAN_RENDER) as span:
        describe_first_message(span, request.messages[0])
        return await run_by_size(
            lambda: _render(request, template, tool_format), _size_to_render(request)
        )


async def chat_prompt(
    request: ChatRequest,
    tokenizer: Tokenizer,
    model: ModelInfo,
    tracer: Tracer,
    *,
    tool_format: ToolFormat,
) -> Prompt:
    text = await chat_text(request, tokenizer, tracer, tool_format=tool_format)
    with stage(tracer, names.SPAN_TOKENIZE):
        token_ids = await run_by_size(
            lambda: _encode_prompt(tokenizer, text, "messages", False, request, model), len(text)
        )
    token_ids = _truncated(token_ids, request, model)
    _check_length(token_ids, model, "messages")
    return Prompt(token_ids, text)


def _size_to_render(request: ChatRequest) -> int:
    """In characters of text; of much it is enough to know that it is too much to be inline."""
    size = len(msgspec.json.encode(request.tools))
    for message in request.messages:
        if size > INLINE_CHARS:
            break
        size += num_chars_of(message) + _CHARS_PER_MESSAGE
    return size


def _render(request: ChatRequest, template: ChatTemplate, tool_format: ToolFormat) -> str:
    messages: Sequence[JsonObject] = template_messages(request.messages, template)
    tools: Sequence[JsonObject] = template_tools(request)
    if tool_format.name == "generic" or not template.takes_tools:
        messages, tools = tools_as_text(messages, tools, tool_format), []
    kwargs = dict(request.chat_template_kwargs or {})
    if reserved := sorted(_RESERVED_TEMPLATE_KWARGS & kwargs.keys()):
        raise invalid("chat_template_kwargs", f"{reserved[0]} can't be set here")
    if request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
    add_generation_prompt = request.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not request.continue_final_message
    try:
        return template.render(
            messages,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=kwargs,
        )
    except ChatTemplateError as error:
        raise invalid("messages", error.message) from None


def unused_template_fields(request: ChatRequest, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Fields that only a template could honour and this one doesn't name."""
    source = tokenizer.chat_template.source if tokenizer.chat_template else ""
    given = {f"chat_template_kwargs.{name}": name for name in request.chat_template_kwargs or {}}
    if request.reasoning_effort is not None:
        given["reasoning_effort"] = "reasoning_effort"
    return tuple(field for field, name in given.items() if name not in source)


# ---------------------------------------------------------------- completions


async def completion_prompts(
    request: CompletionRequest, tokenizer: Tokenizer, model: ModelInfo, tracer: Tracer
) -> list[Prompt]:
    given = _given_prompts(request.prompt)
    # more than the queue holds would be refused even by an idle engine, and by every retry
    max_choices = min(MAX_CHOICES, model.max_queued_samples)
    if len(given) * request.n > max_choices:
        raise invalid("prompt", f"prompts times n may be at most {max_choices}")
    num_chars = sum(len(prompt) for _, prompt in given)
    with stage(tracer, names.SPAN_TOKENIZE):
        return await run_by_size(
            lambda: _completion_prompts(given, request, tokenizer, model), num_chars
        )


def _completion_prompts(
    given: Sequence[tuple[str, str | list[int]]],
    request: CompletionRequest,
    tokenizer: Tokenizer,
    model: ModelInfo,
) -> list[Prompt]:
    prompts: list[Prompt] = []
    num_tokens = 0
    for param, prompt in given:
        prompts.append(_completion_prompt(param, prompt, tokenizer, model, request))
        num_tokens += len(prompts[-1].token_ids) * request.n
        if len(given) > 1 and num_tokens > model.max_queued_tokens:
            raise invalid(
                "prompt",
                f"all prompts times n may together have at most {model.max_queued_tokens} tokens",
            )
    return prompts


def _given_prompts(
    prompt: str | list[str | int | list[int]],
) -> list[tuple[str, str | list[int]]]:
    """Each prompt with the name of the field it stands in."""
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [("prompt", [item for item in prompt if isinstance(item, int)])]
    if len(kinds) > 1:
        raise invalid("prompt", "strings, token ids and lists of token ids can't be mixed")
    return [(f"prompt[{i}]", item) for i, item in enumerate(prompt) if not isinstance(item, int)]


def _completion_prompt(
    param: str,
    prompt: str | list[int],
    tokenizer: Tokenizer,
    model: ModelInfo,
    request: CompletionRequest,
) -> Prompt:
    if isinstance(prompt, str):
        all_token_ids = _encode_prompt(tokenizer, prompt, param, True, request, model)
    else:
        all_token_ids = prompt
    token_ids = _truncated(all_token_ids, request, model)
    _check_length(token_ids, model, param)
    if bad := next((i for i in token_ids if i >= model.vocab_size), None):
        raise invalid(param, f"{bad} is no token id of this model")
    if not request.echo:
        return Prompt(token_ids)
    special = frozenset(filter(tokenizer.is_special, token_ids))
    if isinstance(prompt, str) and len(token_ids) == len(all_token_ids):
        shown = frozenset(i for i in special if tokenizer.token_text(i) in prompt)
        return Prompt(token_ids, prompt, special - shown)
    return Prompt(token_ids, tokenizer.decode(token_ids), special)


# ---------------------------------------------------------------- both


def bad_token_sequences(
    words: Sequence[str] | None, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, as a text begins with it and as one goes on after a space."""
    texts = [
        (f"bad_words[{i}]", text)
        for i, word in enumerate(words or ())
        for text in (word, " " + word.lstrip())
    ]
    sequences = (tuple(encode_text(tokenizer, text, param, False)) for param, text in texts)
    return tuple(dict.fromkeys(filter(None, sequences)))


def _encode_prompt(
    tokenizer: Tokenizer,
    text: str,
    param: str,
    add_special_tokens: bool,
    request: GenerationFields,
    model: ModelInfo,
) -> list[int]:
    """A text that can't fit is refused unread: to encode it costs gigabytes and most of a minute.

    Of one that is to be truncated only the end is read, twice as long as what can be kept: where
    it begins, tokens may be cut otherwise than in the whole text, but those aren't kept.
    """
    if (min_tokens := tokenizer.min_tokens(text)) >= model.max_model_len:
        keep = request.truncate_prompt_tokens
        if keep is None or keep >= model.max_model_len:
            raise context_length_exceeded(min_tokens, model.max_model_len, param, at_least=True)
        text = text[-2 * tokenizer.max_chars(model.max_model_len) :]
    return encode_text(tokenizer, text, param, add_special_tokens)


def _truncated(token_ids: list[int], request: GenerationFields, model: ModelInfo) -> list[int]:
    """The end of the prompt, as long as asked for."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == 0:
        raise invalid("truncate_prompt_tokens", "must be at least 1, or -1 for what fits")
    if keep == -1:
        max_tokens = request.max_completion_tokens or request.max_tokens or 1
        keep = max(model.max_model_len - max_tokens, 1)
    return token_ids[-keep:]


def encode_text(tokenizer: Tokenizer, text: str, param: str, add_special_tokens: bool) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except InvalidText as error:
        raise invalid(param, error.message) from None


def _check_length(token_ids: Sequence[int], model: ModelInfo, param: str) -> None:
    if not token_ids:
        raise invalid(param, "is empty: there is no token to start from")
    if len(token_ids) >= model.max_model_len:
        raise context_length_exceeded(len(token_ids), model.max_model_len, param)
