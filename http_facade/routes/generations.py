"""/v1/chat/completions and /v1/completions: what differs between them, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from http_facade.answering import Answering, Prepare, Prepared
from http_facade.answers import AnswerHead
from http_facade.body import read_body
from http_facade.chat_answers import ChatFormat
from http_facade.completion_answers import CompletionFormat
from http_facade.decode import CHAT, COMPLETIONS, Endpoint, parse_body
from http_facade.engine import ServedModel
from http_facade.facade import FACADE, Facade
from http_facade.params import GenerationPlan, plan_chat, plan_completion, think_first
from http_facade.prompts import (
    Prompt,
    bad_token_sequences,
    chat_prompt,
    completion_prompts,
    unused_template_fields,
)
from http_facade.reasoning import ReasoningSettings
from http_facade.schema import ChatRequest, CompletionRequest, GenerationFields
from http_facade.state import STATE, RequestState
from http_facade.tools import special_markers, unused_tool_fields
from http_facade.tracing import arrival_unix_ns, describe_request, server_span
from traces import names
from traces.stages import stage

FieldsT = TypeVar("FieldsT", bound=GenerationFields)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, CHAT, "chat", _prepare_chat)


async def completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, COMPLETIONS, "text_completion", _prepare_completion)


async def _generate(
    request: web.Request,
    endpoint: Endpoint[FieldsT],
    operation: str,
    make_prepare: Callable[[FieldsT, Facade, RequestState], Prepare],
) -> web.StreamResponse:
    facade, state = request.app[FACADE], request[STATE]
    state.operation = operation
    with server_span(facade, request, state, endpoint.path) as span:
        tracer, arrival = facade.tracer, arrival_unix_ns(state)
        with stage(tracer, names.SPAN_READ_BODY, start_unix_ns=arrival):
            body = await read_body(request, facade.config.max_body_bytes)
        with stage(tracer, names.SPAN_PARSE):
            decoded = await parse_body(body, endpoint, strict=facade.config.strict_params)
            fields = decoded.request
            describe_request(span, fields, operation)
        state.ignored = decoded.ignored
        if facade.config.edge.log_prompts:
            state.prompt = decoded.prompt
        del body, decoded  # which hold all that was asked for once more
        return await Answering(
            request=request,
            facade=facade,
            state=state,
            span=span,
            prompt_param=endpoint.prompt_param,
            model_name=fields.model,
            prepare=make_prepare(fields, facade, state),
        ).answer()


def _prepare_chat(fields: ChatRequest, facade: Facade, state: RequestState) -> Prepare:
    ignored = state.ignored

    async def prepare(model: ServedModel, head: AnswerHead) -> Prepared:
        plan, prompt = await plan_and_prompt(fields, facade, model)
        state.ignored = (*ignored, *unused_fields(fields, model))
        return Prepared(plan, [prompt], ChatFormat(head, prompt=prompt, options=plan.answer))

    return prepare


async def plan_and_prompt(
    fields: ChatRequest, facade: Facade, model: ServedModel
) -> tuple[GenerationPlan, Prompt]:
    """All that a chat asks of the engine. Raises ApiError."""
    with stage(facade.tracer, names.SPAN_PLAN):
        plan = chat_plan(fields, facade, model)
    prompt = await chat_prompt(
        fields,
        model.tokenizer,
        model.info,
        facade.tracer,
        tool_format=facade.tool_format(model),
    )
    return think_first(plan, prompt), prompt


def chat_plan(fields: ChatRequest, facade: Facade, model: ServedModel) -> GenerationPlan:
    """All but the prompt. Raises ApiError."""
    tool_format = facade.tool_format(model)
    return plan_chat(
        fields,
        model.info,
        tool_format=tool_format,
        special_markers=special_markers(tool_format, model.tokenizer),
        reasoning=ReasoningSettings.of(facade.config, model.tokenizer),
        max_stop_strings=facade.config.max_stop_strings,
        bad_token_sequences=bad_token_sequences(fields.bad_words, model.tokenizer),
    )


def unused_fields(fields: ChatRequest, model: ServedModel) -> tuple[str, ...]:
    """Fields that say nothing to this model or without others, for x-ignored-params."""
    return (*unused_tool_fields(fields), *unused_template_fields(fields, model.tokenizer))


def _prepare_completion(fields: CompletionRequest, facade: Facade, state: RequestState) -> Prepare:
    async def prepare(model: ServedModel, head: AnswerHead) -> Prepared:
        with stage(facade.tracer, names.SPAN_PLAN):
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
