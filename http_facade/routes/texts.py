"""/tokenize, /detokenize and /v1/chat/completions/render: what text and tokens a request is.

Long inputs are worked on in a thread. Nothing here asks the engine anything.
"""

from __future__ import annotations

import msgspec
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from clients.text.tokenizer import Tokenizer
from http_facade.body import read_body
from http_facade.decode import DETOKENIZE, RENDER, TOKENIZE, Endpoint, RequestT, parse_body
from http_facade.engine import ServedModel
from http_facade.errors import invalid
from http_facade.facade import FACADE, Facade
from http_facade.off_loop import run_by_size
from http_facade.prompts import chat_text, encode_text
from http_facade.routes.generations import chat_plan, plan_and_prompt, unused_fields
from http_facade.schema import MAX_TOKENIZE_CHARS, ChatRequest, DetokenizeRequest, TokenizeRequest
from http_facade.state import STATE
from http_facade.tracing import server_span

_OF_MESSAGES = (
    "tools",
    "tool_choice",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
)


class TokenizeBody(Struct, frozen=True):
    count: int
    max_model_len: int  # prompt and answer together
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeBody(Struct, frozen=True):
    prompt: str


class RenderBody(Struct, frozen=True):
    prompt: str  # the text of token_ids, special tokens shown
    token_ids: list[int]
    ignored: tuple[str, ...]  # what x-ignored-params names


async def tokenize(request: web.Request) -> web.Response:
    facade = request.app[FACADE]
    state = request[STATE]
    with server_span(facade, request, state, TOKENIZE.path):
        fields = await _read(request, TOKENIZE)
        model = facade.served_model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if fields.prompt is None:
            chat = _chat(fields, model)
            state.ignored += unused_fields(chat, model)
            text = await _messages_text(facade, chat, model)
        else:
            text = _prompt_text(fields.prompt, fields)
        body = await run_by_size(lambda: _tokens_of(text, fields, model), len(text))
        return _json(body)


async def detokenize(request: web.Request) -> web.Response:
    facade = request.app[FACADE]
    fields = await _read(request, DETOKENIZE)
    tokenizer = facade.served_model(fields.model).tokenizer
    return _json(await run_by_size(lambda: _text_of(fields, tokenizer), len(fields.tokens)))


async def render(request: web.Request) -> web.Response:
    """The prompt that the same request to /v1/chat/completions would send to the engine."""
    facade, state = request.app[FACADE], request[STATE]
    with server_span(facade, request, state, RENDER.path):
        fields = await _read(request, RENDER)
        model = facade.served_model(fields.model)
        _, prompt = await plan_and_prompt(fields, facade, model)
        state.ignored += unused_fields(fields, model)
        token_ids, text = list(prompt.token_ids), prompt.text
        if fields.truncate_prompt_tokens is not None:
            text = model.tokenizer.decode(token_ids, skip_special_tokens=False)
        return _json(RenderBody(text, token_ids, state.ignored))


async def _read(request: web.Request, endpoint: Endpoint[RequestT]) -> RequestT:
    config = request.app[FACADE].config
    body = await read_body(request, config.max_body_bytes)
    decoded = await parse_body(body, endpoint, strict=config.strict_params)
    request[STATE].ignored = decoded.ignored
    return decoded.request


def _json(document: Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")


# ---------------------------------------------------------------- what is tokenized


def _prompt_text(prompt: str, fields: TokenizeRequest) -> str:
    given = msgspec.structs.asdict(fields)
    for name in _OF_MESSAGES:
        if given[name] is not None:
            raise invalid(name, "needs messages in place of prompt")
    return prompt


def _chat(fields: TokenizeRequest, model: ServedModel) -> ChatRequest:
    if fields.add_special_tokens:
        raise invalid("add_special_tokens", "the chat template writes the special tokens itself")
    return ChatRequest(
        model=model.info.model,
        messages=fields.messages or [],
        tools=fields.tools,
        tool_choice=fields.tool_choice,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=bool(fields.continue_final_message),
        chat_template_kwargs=fields.chat_template_kwargs,
        reasoning_effort=fields.reasoning_effort,
    )


async def _messages_text(facade: Facade, chat: ChatRequest, model: ServedModel) -> str:
    chat_plan(chat, facade, model)  # for its checks
    text = await chat_text(
        chat, model.tokenizer, facade.tracer, tool_format=facade.tool_format(model)
    )
    if len(text) > MAX_TOKENIZE_CHARS:
        raise invalid("messages", f"at most {MAX_TOKENIZE_CHARS} characters are tokenized")
    return text


def _tokens_of(text: str, fields: TokenizeRequest, model: ServedModel) -> TokenizeBody:
    is_prompt = fields.prompt is not None
    token_ids = encode_text(
        model.tokenizer,
        text,
        "prompt" if is_prompt else "messages",
        is_prompt and fields.add_special_tokens is not False,
    )
    shown: list[str] | UnsetType = UNSET
    if fields.return_token_strs:
        shown = [model.tokenizer.token_text(token_id) for token_id in token_ids]
    return TokenizeBody(len(token_ids), model.info.max_model_len, token_ids, shown)


def _text_of(fields: DetokenizeRequest, tokenizer: Tokenizer) -> DetokenizeBody:
    for i, token_id in enumerate(fields.tokens):
        if not tokenizer.token_bytes(token_id):  # also of padding inside the vocabulary
            raise invalid(f"tokens[{i}]", f"{token_id} is no token id of this model")
    return DetokenizeBody(tokenizer.decode(fields.tokens, skip_special_tokens=False))
