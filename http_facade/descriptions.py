"""What each field of a request means, in a line: for /openapi.json and docs/compatibility.md.

Types, ranges and defaults are the schema's; a test compares the fields. A Struct's fields include
those of the Struct that it extends.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from http_facade.schema import (
    ChatRequest,
    ChosenFunction,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    FunctionCall,
    FunctionDefinition,
    GenerationFields,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    TokenizeRequest,
    ToolCall,
    ToolChoice,
    ToolDefinition,
)

_OF_TEMPLATES: Mapping[str, str] = {
    "messages": "the chat so far",
    "tools": "functions that the model may call",
    "tool_choice": "none, auto, required, or the function to call; auto when there are tools",
    "add_generation_prompt": (
        "end the prompt where an answer begins; the default, unless the last message is continued"
    ),
    "continue_final_message": "go on with the last message in place of beginning a new one",
    "chat_template_kwargs": "further variables for the chat template",
    "reasoning_effort": "how long to think, where the template knows of it",
}

_FIELDS: Mapping[type[Struct], Mapping[str, str]] = {
    GenerationFields: {
        "model": "a name of /v1/models",
        "stream": "send the answer as server-sent events while it is made",
        "stream_options": "needs `stream`",
        "n": "answers per prompt",
        "best_of": "only as another word for `n`",
        "max_tokens": "at most so many tokens per answer",
        "max_completion_tokens": "the newer name of `max_tokens`",
        "temperature": "0 takes the likeliest token; the model's own default where it has one",
        "top_p": "sample from the likeliest tokens that together have this probability",
        "top_k": "sample from so many of the likeliest tokens; 0 or -1: all",
        "min_p": "leave out tokens less likely than this share of the likeliest",
        "presence_penalty": "lowers the logits of tokens that were generated before",
        "frequency_penalty": "lowers the logits of tokens for each time they were generated before",
        "repetition_penalty": "divides the logits of tokens of prompt and answer; 1: off",
        "seed": "the same seed and request give the same answer, whatever else is being answered",
        "logit_bias": "by token id, added to the logit",
        "allowed_token_ids": "no other token is generated",
        "bad_words": "texts that are not generated",
        "stop": "texts that end the answer; they are cut off",
        "stop_token_ids": "tokens that end the answer",
        "include_stop_str_in_output": "leave the matched stop text in the answer",
        "min_tokens": "nothing ends an answer before it has so many tokens",
        "ignore_eos": "go on after the model's end token",
        "skip_special_tokens": "leave special tokens out of the text",
        "prompt_logprobs": "log-probabilities of the prompt's tokens, with so many alternatives",
        "return_token_ids": "the ids of prompt and answer, beside the text",
        "timings": "where the answer's time went, with it or with the last chunk",
        "truncate_prompt_tokens": (
            "keep only so many tokens of the prompt's end; -1: as many as leave room for the answer"
        ),
        "response_format": "text, any JSON object, or JSON by a schema",
        "structured_outputs": "what the answer must look like: one of its fields",
        "guided_json": "the older name of structured_outputs.json",
        "guided_regex": "the older name of structured_outputs.regex",
        "guided_choice": "the older name of structured_outputs.choice",
        "guided_grammar": "the older name of structured_outputs.grammar",
        "regex": "another name of structured_outputs.regex",
        "ebnf": "another name of structured_outputs.grammar",
        "priority": "lower is served earlier, as far as the key may",
        "prompt_cache_key": "requests of one key go to one engine, unless it is overloaded",
        "cache_salt": "prompts share cached prefixes only with those of the same salt",
        "user": "who asks, for logs and traces; hashed",
        "safety_identifier": "the newer name of `user`",
    },
    ChatRequest: {
        **_OF_TEMPLATES,
        "parallel_tool_calls": "false: at most one call per answer",
        "logprobs": "the log-probability of each token of the answer",
        "top_logprobs": "and that of so many alternatives; needs `logprobs`",
        "include_reasoning": "false: the model's thought is left out of the answer",
    },
    CompletionRequest: {
        "prompt": "a text, texts, token ids, or lists of token ids",
        "max_tokens": "at most so many tokens per answer, 16 by default; 0 with `echo`",
        "logprobs": "the log-probability of each token, with so many alternatives",
        "echo": "the prompt before the answer",
    },
    TokenizeRequest: {
        **_OF_TEMPLATES,
        "model": "a name of /v1/models; absent: the model that is served",
        "prompt": "the text; or give `messages`",
        "add_special_tokens": "as the model wants them around a prompt; true by default",
        "return_token_strs": "also each token's text, not how the vocabulary spells it",
    },
    DetokenizeRequest: {
        "model": "a name of /v1/models; absent: the model that is served",
        "tokens": "token ids",
    },
    StreamOptions: {
        "include_usage": "a last event with the usage of the whole answer",
        "continuous_usage_stats": "usage so far with each event",
    },
    ResponseFormat: {
        "type": "text, json_object or json_schema",
        "json_schema": "with the type json_schema",
    },
    JsonSchemaFormat: {
        "schema": "the JSON Schema; a keyword that can't be enforced is refused by its path",
        "name": "not used",
        "description": "not used",
        "strict": "enforced either way",
    },
    StructuredOutputs: {
        "json": "a JSON Schema",
        "json_object": "any JSON object",
        "regex": "a regular expression for the whole answer",
        "choice": "one of these texts",
        "grammar": "a grammar in EBNF",
        "structural_tag": "xgrammar's structural tags",
    },
    Message: {
        "role": "developer is the same as system where the template doesn't know it",
        "content": "a text, or text parts, which are joined; null for an assistant that calls",
        "name": "for templates that show it",
        "tool_calls": "what the assistant called",
        "tool_call_id": "the call that a tool's message answers",
        "reasoning_content": "the assistant's thought, for templates that show it",
        "reasoning": "another name of `reasoning_content`",
    },
    ContentPart: {"type": "text: the model reads nothing else", "text": "the part's text"},
    ToolCall: {"id": "as it was given", "type": "function", "function": "what was called"},
    FunctionCall: {"name": "the function", "arguments": "a JSON object, as text"},
    ToolDefinition: {"type": "function", "function": "what may be called"},
    FunctionDefinition: {
        "name": "what the model calls it by",
        "description": "for the model",
        "parameters": "a JSON Schema of the arguments; absent: there are none",
        "strict": "true: refuse what of the schema can't be enforced in place of relaxing it",
    },
    ToolChoice: {"type": "function", "function": "the one to call"},
    ChosenFunction: {"name": "the function"},
}


def description_of(struct: type[Struct], field: str) -> str | None:
    """None: there are no words about this Struct's fields, which are an answer's."""
    for ancestor in struct.__mro__:
        if (words := _FIELDS.get(ancestor, {}).get(field)) is not None:
            return words
    return None


def described_structs() -> tuple[type[Struct], ...]:
    return tuple(_FIELDS)
