"""The way that both generation endpoints share, from a decoded request to a finished answer.

    prepare (plan, prompts) -> run -> first batch -> headers -> deltas -> end

Nothing is written before the first batch, which the engine's first PrefillProgress or Delta makes:
what fails before that has its real status, stream or not. What fails later ends a stream with one
error event, usage so far, and [DONE].
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web
from msgspec import UNSET
from opentelemetry.trace import Span

from clients.errors import EngineClientError, InternalError, InvalidRequest, TokenizerStale
from clients.text.errors import TextLayerError
from http_facade.answers import (
    AnswerFormat,
    AnswerHead,
    ChunkUsage,
    UsageBody,
    WholeChoice,
    usage_body,
)
from http_facade.engine import ServedModel
from http_facade.errors import (
    ApiError,
    ErrorBody,
    from_engine_error,
    internal,
    invalid,
    unavailable,
)
from http_facade.facade import Facade
from http_facade.generation import GenerationRun, PromptCall
from http_facade.keys import reserve_tokens
from http_facade.output_processor import ChoiceDelta, UsageCounter
from http_facade.params import GenerationPlan
from http_facade.prompt_calls import prompt_calls
from http_facade.prompts import Prompt
from http_facade.sse import EventStream
from http_facade.state import RequestState
from http_facade.timings import SERVER_TIMING, TimingsBody, server_timing, timings_body
from http_facade.tracing import FirstContent, prompts_are_made

_TIMEOUT_HEADER = "x-request-timeout"  # seconds
_MAX_TIMEOUT_SECONDS = 86_400.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    plan: GenerationPlan
    prompts: Sequence[Prompt]
    format: AnswerFormat


Prepare = Callable[[ServedModel, AnswerHead], Awaitable[Prepared]]


class StreamFailure(msgspec.Struct, frozen=True):
    """What a stream says in place of a finish reason."""

    error: ErrorBody
    usage: UsageBody


@dataclass(frozen=True, slots=True)
class Answering:
    """One request of either endpoint."""

    request: web.Request
    facade: Facade
    state: RequestState
    span: Span
    prompt_param: str
    model_name: str  # as the caller gave it
    prepare: Prepare

    async def answer(self) -> web.StreamResponse:
        """Raises ApiError as long as nothing is written."""
        timeout_seconds = _timeout_seconds(self.request)
        try:
            model = self._named_model()
            try:
                return await self._attempt(model, timeout_seconds)
            except TokenizerStale:  # the engines have another one now, which is known by now
                return await self._attempt(self._named_model(), timeout_seconds)
        except EngineClientError as error:
            raise self.api_error(error) from None
        except TextLayerError as error:
            logger.error("the engine's tokenizer can't be used: %s", error.message)
            raise unavailable("the engine's tokenizer can't be used") from None

    def _named_model(self) -> ServedModel:
        model = self.facade.served_model(self.model_name)
        self.state.model = self.model_name
        return model

    async def _attempt(
        self, model: ServedModel, timeout_seconds: float | None
    ) -> web.StreamResponse:
        head = AnswerHead(
            self.state.answer_id, int(time.time()), self.model_name, model.fingerprint
        )
        prepared = await self.prepare(model, head)
        prompts_are_made(self.span, self.state)
        self.state.prompt_tokens = sum(len(prompt.token_ids) for prompt in prepared.prompts)
        reserve_tokens(self.state.allowance, self._most_tokens(prepared, model))
        usage = UsageCounter(self.state.prompt_tokens, prepared.plan.n)
        if timeout_seconds is not None:
            timeout_seconds = max(timeout_seconds - self.state.elapsed_seconds(), 0.0)
        calls = prompt_calls(prepared.plan, prepared.prompts, model, self.state)
        run = GenerationRun(self.facade.placement, self.model_name, calls, timeout=timeout_seconds)
        with self.facade.runs.track(run):
            async with run:
                output = _Output(self, prepared, run, usage, calls)
                first = await _first_batch(run, prepared.plan)
                self.state.has_begun = True
                self.state.ignored += _relaxed(calls, prepared.plan)
                if prepared.plan.stream:
                    return await output.stream(first)
                return await output.whole(first)

    def _most_tokens(self, prepared: Prepared, model: ServedModel) -> int:
        """All that the request may come to, prompts and answers."""
        most = prepared.plan.stopping.max_tokens
        lengths = [len(prompt.token_ids) for prompt in prepared.prompts]
        longest = model.info.max_output_tokens
        rooms = [min(model.info.max_model_len - length, longest) for length in lengths]
        answers = sum(room if most is None else min(most, room) for room in rooms)
        return sum(lengths) + prepared.plan.n * answers

    def api_error(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, InternalError):
            logger.error("request %s: a fault of the engine: %s", error.request_id, error.message)
        if isinstance(error, EngineClientError):
            return from_engine_error(error, prompt_param=self.prompt_param, model=self.model_name)
        logger.error("request %s failed", self.state.request_id, exc_info=error)
        return internal()


class _Output:
    """Writes one run's deltas, as a stream or as a whole."""

    def __init__(
        self,
        answering: Answering,
        prepared: Prepared,
        run: GenerationRun,
        usage: UsageCounter,
        calls: Sequence[PromptCall],
    ) -> None:
        self._answering = answering
        self._state = answering.state
        self._plan = prepared.plan
        self._num_choices = len(prepared.prompts) * prepared.plan.n
        self._format = prepared.format
        self._run = run
        self._usage = usage
        self._calls = calls
        self._first_content = FirstContent(answering.facade, answering.span, self._state)

    async def whole(self, first: list[ChoiceDelta] | None) -> web.Response:
        choices = [WholeChoice(index) for index in range(self._num_choices)]
        batch = first
        while batch is not None:
            for delta in batch:
                self._count(delta)
                choices[delta.index].add(delta)
            if any(map(_is_content, batch)):
                self._first_content.is_there()
                self._first_content.kept_for_later()
            batch = await self._run.next_batch()
        document = self._format.whole(choices, usage_body(self._usage.usage()))
        timings = self._timings()
        if self._plan.timings:
            document = msgspec.structs.replace(document, timings=timings)
        return web.Response(
            body=msgspec.json.encode(document),
            content_type="application/json",
            headers={SERVER_TIMING: server_timing(timings)},
        )

    async def stream(self, first: list[ChoiceDelta] | None) -> web.StreamResponse:
        events = EventStream(self._answering.request)
        await events.start()
        try:
            await self._send_deltas(events, first)
        except ConnectionError:  # the client is gone
            raise
        except Exception as failure:
            error = self._answering.api_error(failure)
            self._state.error_code = error.code or str(error.status)
            usage = usage_body(self._usage.usage())
            await events.send([StreamFailure(error.envelope().error, usage)])
        return await events.end()

    async def _send_deltas(self, events: EventStream, first: list[ChoiceDelta] | None) -> None:
        keepalive_seconds = self._answering.facade.config.sse_keepalive_seconds or None
        batch = first
        while batch is not None:
            if batch:
                await self._send(events, batch)  # which may be nothing that is shown
            if keepalive_seconds and events.silent_seconds >= keepalive_seconds:
                await events.keep_alive()
            batch = await self._run.next_batch(keepalive_seconds)
        if self._plan.include_usage or self._plan.timings:
            await events.send([self._last_chunk()])

    def _last_chunk(self) -> msgspec.Struct:
        """It has no choices: usage, timings, or both, as the caller asked."""
        chunk = self._format.usage_chunk(usage_body(self._usage.usage()))
        if not self._plan.timings:
            return chunk
        if not self._plan.include_usage:
            chunk = msgspec.structs.replace(chunk, usage=self._chunk_usage())
        return msgspec.structs.replace(chunk, timings=self._timings())

    def _timings(self) -> TimingsBody:
        told = [timing for call in self._calls for timing in call.processor.timings]
        return timings_body(self._state, self._answering.span, told)

    async def _send(self, events: EventStream, batch: list[ChoiceDelta]) -> None:
        documents: list[msgspec.Struct] = []
        has_content = any(map(_is_content, batch))
        if has_content:
            self._first_content.is_there()
        for delta in batch:
            self._count(delta)
            documents.extend(self._format.chunks(delta, self._chunk_usage()))
        await events.send(documents)
        if has_content and self._state.ttft_seconds is None:
            self._state.ttft_seconds = self._state.elapsed_seconds()
            self._first_content.written()

    def _chunk_usage(self) -> ChunkUsage:
        """What a chunk before the last one says about usage."""
        if self._plan.continuous_usage:
            return usage_body(self._usage.usage())
        return None if self._plan.include_usage else UNSET

    def _count(self, delta: ChoiceDelta) -> None:
        self._usage.count(delta)
        self._state.completion_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._state.finish_reasons.append(delta.finish_reason)


def _is_content(delta: ChoiceDelta) -> bool:
    return bool(delta.text or delta.thought or delta.calls)


async def _first_batch(run: GenerationRun, plan: GenerationPlan) -> list[ChoiceDelta] | None:
    try:
        return await run.next_batch()
    except InvalidRequest as error:
        refusal = plan.constraint.refusal(error) if plan.constraint else None
        raise refusal or error from None


def _relaxed(calls: Sequence[PromptCall], plan: GenerationPlan) -> tuple[str, ...]:
    """What of the constraint is not enforced, by the caller's own fields."""
    if plan.constraint is None:
        return ()
    return tuple(map(plan.constraint.param_at, calls[0].processor.relaxed))


def _timeout_seconds(request: web.Request) -> float | None:
    given = request.headers.get(_TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_TIMEOUT_SECONDS:
        raise invalid(
            _TIMEOUT_HEADER,
            f"must be a number of seconds above 0, at most {_MAX_TIMEOUT_SECONDS:g}",
        )
    return seconds
