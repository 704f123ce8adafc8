"""/v1/chat/completions and /v1/completions: what differs between them, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from http_facade.answering import Answering, Prepare, Prepared
from http_facade.answers import AnswerHead
from http_facade.body import read_json
from http_facade.chat_answers import ChatFormat
from http_facade.completion_answers import CompletionFormat
from http_facade.decode import CHAT, COMPLETIONS, Endpoint, RequestT, decode_request
from http_facade.engine import ServedModel
from http_facade.facade import FACADE, Facade
from http_facade.params import plan_chat, plan_completion
from http_facade.prompts import (
    bad_token_sequences,
    chat_prompt,
    completion_prompts,
    unused_template_fields,
)
from http_facade.schema import ChatRequest, CompletionRequest
from http_facade.state import STATE, RequestState
from http_facade.tools import unused_tool_fields
from http_facade.tracing import describe_request, server_span


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, CHAT, "chat", _prepare_chat)


async def completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, COMPLETIONS, "text_completion", _prepare_completion)


async def _generate(
    request: web.Request,
    endpoint: Endpoint[RequestT],
    operation: str,
    make_prepare: Callable[[RequestT, Facade, RequestState], Prepare],
) -> web.StreamResponse:
    facade, state = request.app[FACADE], request[STATE]
    state.operation = operation
    with server_span(facade.tracer, request, state, endpoint.path) as span:
        body = await read_json(request, facade.config.max_body_bytes)
        decoded = decode_request(body, endpoint, strict=facade.config.strict_params)
        state.ignored = decoded.ignored
        describe_request(span, decoded.request, operation)
        return await Answering(
            request=request,
            facade=facade,
            state=state,
            span=span,
            prompt_param=endpoint.prompt_param,
            model_name=decoded.request.model,
            prepare=make_prepare(decoded.request, facade, state),
        ).answer()


def _prepare_chat(fields: ChatRequest, facade: Facade, state: RequestState) -> Prepare:
    ignored = (*state.ignored, *unused_tool_fields(fields))

    async def prepare(model: ServedModel, head: AnswerHead) -> Prepared:
        tool_format = facade.tool_format(model)
        plan = plan_chat(
            fields,
            model.info,
            tool_format=tool_format,
            max_stop_strings=facade.config.max_stop_strings,
            bad_token_sequences=bad_token_sequences(fields.bad_words, model.tokenizer),
        )
        state.ignored = (*ignored, *unused_template_fields(fields, model.tokenizer))
        prompt = await chat_prompt(
            fields, model.tokenizer, model.info, facade.tracer, tool_format=tool_format
        )
        return Prepared(plan, [prompt], ChatFormat(head, prompt=prompt, options=plan.answer))

    return prepare


def _prepare_completion(fields: CompletionRequest, facade: Facade, state: RequestState) -> Prepare:
    async def prepare(model: ServedModel, head: AnswerHead) -> Prepared:
        plan = plan_completion(
            fields,
            model.info,
            max_stop_strings=facade.config.max_stop_strings,
            bad_token_sequences=bad_token_sequences(fields.bad_words, model.tokenizer),
        )
        prompts = await completion_prompts(fields, model.tokenizer, model.info, facade.tracer)
        answer_format = CompletionFormat(head, n=plan.n, prompts=prompts, options=plan.answer)
        return Prepared(plan, prompts, answer_format)

    return prepare
