"""What a planned request asks of the engine, one call per prompt, and what reads its answers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial

from clients.text.text_stream import TextStream
from clients.text.tokenizer import Tokenizer
from clients.types import GenerateRequest
from http_facade.engine import ServedModel
from http_facade.generation import PromptCall
from http_facade.output_processor import PromptProcessor
from http_facade.params import GenerationPlan
from http_facade.prompt_logprobs import PromptLogprobsCollector
from http_facade.prompts import Prompt
from http_facade.state import RequestState
from http_facade.tool_calls import ToolCallStream
from http_facade.tools import ToolPlan


def prompt_calls(
    plan: GenerationPlan, prompts: Sequence[Prompt], model: ServedModel, state: RequestState
) -> list[PromptCall]:
    """The engine's ids are the caller's plus a random suffix: a proxy's retry never collides."""
    call_id = f"{state.request_id}-{secrets.token_hex(4)}"
    hidden = set(plan.text.stop_token_ids)
    if not plan.stopping.ignore_eos:
        hidden |= set(model.info.eos_token_ids)

    shown = _marker_ids(plan, model.tokenizer)

    def make_text_stream(prompt: Prompt) -> TextStream:
        return TextStream(
            model.tokenizer,
            stop=plan.text.stop,
            include_stop_str_in_output=plan.text.include_stop_str_in_output,
            skip_special_tokens=plan.text.skip_special_tokens,
            min_tokens=plan.text.min_tokens,
            want_logprobs=plan.text.want_logprobs,
            hidden_token_ids=hidden,
            shown_token_ids=shown,
            reasoning=plan.reasoning.parser(prompt.text) if plan.reasoning else None,
        )

    calls = []
    for i, prompt in enumerate(prompts):
        request = GenerateRequest(
            prompt=prompt.token_ids,
            request_id=call_id + (f"-{i}" if len(prompts) > 1 else ""),
            model=model.info.model,
            sampling=plan.sampling,
            stopping=plan.stopping,
            structured_output=plan.constraint.output if plan.constraint else None,
            num_logprobs=plan.num_logprobs,
            num_prompt_logprobs=plan.num_prompt_logprobs,
            tells_timing=plan.timings or not plan.stream,
            cache_salt=plan.cache_salt,
            priority=state.priority(plan.priority),
            tenant=state.tenant,
            attempt=state.attempt,
            tokenizer_digest=model.info.tokenizer_digest,
        )
        stop_token_ids = plan.text.stop_token_ids
        collector = None
        if plan.num_prompt_logprobs is not None:
            collector = PromptLogprobsCollector(
                prompt.token_ids, model.tokenizer, prompt.hidden_token_ids
            )
        processor = PromptProcessor(
            i * plan.n,
            plan.n,
            partial(make_text_stream, prompt),
            stop_token_ids,
            make_call_stream=partial(_call_stream, plan.tools),
            prompt_logprobs=collector,
            prompt_only=plan.text.prompt_only,
        )
        calls.append(PromptCall(request, processor, plan.cache_key))
    return calls


def _call_stream(tools: ToolPlan | None) -> ToolCallStream | None:
    if tools is None:
        return None
    return ToolCallStream(
        tools.format.parser(tools.names),
        tools.format.new_call_id,
        is_named=tools.is_named,
        is_forced=tools.is_forced,
        max_calls=None if tools.parallel else 1,
    )


def _marker_ids(plan: GenerationPlan, tokenizer: Tokenizer) -> set[int]:
    """Special tokens around calls and thoughts: skipped, none of those would be seen."""
    markers = plan.tools.format.markers if plan.tools else ()
    markers += plan.reasoning.tags if plan.reasoning else ()
    ids = {tokenizer.token_id(marker) for marker in markers if marker}
    return {token_id for token_id in ids if token_id is not None}
