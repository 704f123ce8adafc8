"""What a request may say: the fields that each endpoint honours, with types and ranges.

These Structs are the one description of the surface: decoding checks against them, and documents
about the surface are made from them. Every field is optional unless it has no default; null is the
same as absent. Fields that are not honoured stand in `decisions.py`, words about those that are in
`descriptions.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

MAX_CHOICES = 1024  # prompts times n
MAX_STOP_STRING_CHARS = 2_000
MAX_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 200
MAX_STOP_TOKEN_IDS = 1024
MAX_TOOLS = 128
MAX_TOKENIZE_CHARS = 2_000_000  # a few seconds of a thread, and 200 MB
MAX_DETOKENIZE_TOKENS = 1_000_000
COMPLETION_MAX_TOKENS = 16  # the default of the completions endpoint

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]


# ---------------------------------------------------------------- messages


class ContentPart(Struct, kw_only=True):
    type: str
    text: str | None = None


class FunctionCall(Struct, kw_only=True):
    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Struct, kw_only=True):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # the message's thought
    reasoning: str | None = None  # another name of the same


# ---------------------------------------------------------------- tools


class FunctionDefinition(Struct, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, object] | None = None  # a JSON Schema; none: there are no arguments
    strict: bool | None = None  # refuse what of the schema can't be enforced, don't relax it


class ToolDefinition(Struct, kw_only=True):
    type: str
    function: FunctionDefinition | None = None


class ChosenFunction(Struct, kw_only=True):
    name: str


class ToolChoice(Struct, kw_only=True):
    type: str
    function: ChosenFunction | None = None


# ---------------------------------------------------------------- both endpoints


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Struct, kw_only=True):
    schema: dict[str, object]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # enforced either way


class ResponseFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, kw_only=True):
    json: str | dict[str, object] | None = None  # a JSON Schema
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, object] | None = None


class GenerationFields(Struct, kw_only=True):
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    best_of: Count | None = None  # only as another word for n
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None  # -1, 0: off
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.03125, le=10)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: NonNegative | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool = False
    timings: bool = False
    # keeps the end of the prompt; -1: as much as leaves room for max_tokens
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, object] | None = None  # older names of what stands above
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    user: str | None = None
    safety_identifier: str | None = None


# ---------------------------------------------------------------- the two requests


class ChatRequest(GenerationFields, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None  # default: as many calls as the model makes
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None  # default: unless the last message is continued
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None  # if the template takes it
    include_reasoning: bool = True  # false: the thought is left out of the answer


class CompletionRequest(GenerationFields, kw_only=True):
    # a string, strings, token ids, or lists of token ids
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    echo: bool = False
    max_tokens: NonNegative | None = None  # 0: the echoed prompt only


# ---------------------------------------------------------------- text to tokens and back


class TokenizeRequest(Struct, kw_only=True):
    """Either `prompt` or `messages`, and the fields that belong to it."""

    model: str | None = None  # absent: the model that is served
    prompt: Annotated[str, Meta(max_length=MAX_TOKENIZE_CHARS)] | None = None
    add_special_tokens: bool | None = None  # of a prompt, default true; a template writes its own
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Struct, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_DETOKENIZE_TOKENS)]
    model: str | None = None
