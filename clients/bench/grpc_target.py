"""An engine over gRPC: tokens in, tokens out, without the facade in between."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import perf_counter

from clients.bench.answer import Answer, FailureKind, TokenUsage
from clients.bench.target import Api, Call, TargetError, TargetOptions
from clients.bench.workloads import PERSON_SCHEMA, Prompt
from clients.engine_client import EngineClient
from clients.errors import DeadlineExceeded, EngineClientError, EngineUnavailable
from clients.generate_stream import GenerateStream
from clients.options import ClientOptions
from clients.text.chat_template import ChatTemplate
from clients.text.errors import ChatTemplateError, TextLayerError
from clients.text.tokenizer import Tokenizer
from clients.types import (
    Delta,
    Finished,
    GenerateRequest,
    SamplingParams,
    StoppingCriteria,
    StructuredOutput,
)

_PERSON = StructuredOutput(json_schema=json.dumps(PERSON_SCHEMA))


@asynccontextmanager
async def grpc_target(address: str, options: TargetOptions) -> AsyncIterator[GrpcTarget]:
    """`address` is HOST:PORT. Raises TargetError."""
    # No retries: a refusal is something to count, not to hide.
    client_options = ClientOptions(token=options.api_key, max_attempts=1)
    async with EngineClient(address, options=client_options) as client:
        try:
            info = await client.get_model_info()
            bundle = await client.get_tokenizer()
            tokenizer = Tokenizer.from_files({} if bundle is None else bundle.files)
        except (EngineClientError, TextLayerError, ValueError) as error:
            raise TargetError(f"the engine at {address} cannot be measured: {error}") from error
        if options.api is Api.CHAT:
            _template_of(tokenizer)  # raises before the first prompt does
        model = options.model or info.model
        yield GrpcTarget(client, address, model, options, tokenizer)


class GrpcTarget:
    """Its client belongs to `grpc_target`."""

    def __init__(
        self,
        client: EngineClient,
        address: str,
        model: str,
        options: TargetOptions,
        tokenizer: Tokenizer,
    ) -> None:
        self._client = client
        self._options = options
        self._tokenizer = tokenizer
        self.address = f"grpc://{address}"
        self.model = model

    def prepare(self, prompt: Prompt) -> Call:
        is_ignoring_eos = self._options.is_ignoring_eos and not prompt.has_schema
        request = GenerateRequest(
            prompt=self._prompt(prompt),
            model=self.model,
            sampling=SamplingParams(temperature=0),
            stopping=StoppingCriteria(
                max_tokens=prompt.max_tokens, ignore_eos=is_ignoring_eos or None
            ),
            structured_output=_PERSON if prompt.has_schema else None,
        )
        return functools.partial(self._send, request)

    def _prompt(self, prompt: Prompt) -> str | Sequence[int]:
        """A chat goes as ids always: to a text the engine would add special tokens once more."""
        if self._options.api_for(prompt) is Api.CHAT:
            return self._tokenizer.encode(self._chat(prompt.text), add_special_tokens=False)
        if self._options.sends_text:
            return prompt.text
        return self._tokenizer.encode(prompt.text)

    def _chat(self, text: str) -> str:
        template = _template_of(self._tokenizer)
        try:
            return template.render([{"role": "user", "content": text}])
        except ChatTemplateError as error:
            raise TargetError(error.message) from error

    async def _send(self, request: GenerateRequest, answer: Answer) -> None:
        token_ids: list[int] = []
        answer.send()
        try:
            async with self._client.generate(
                request, timeout=self._options.timeout_seconds
            ) as stream:
                await _read(stream, answer, token_ids)
        except EngineClientError as error:
            _fail(answer, error)
        answer.end()
        answer.texts.append(self._tokenizer.decode(token_ids))
        if not token_ids:
            answer.fail(FailureKind.NO_TEXT, "the stream ended without any token")


def _template_of(tokenizer: Tokenizer) -> ChatTemplate:
    if tokenizer.chat_template is None:
        raise TargetError("the model has no chat template; give --api completions")
    return tokenizer.chat_template


async def _read(stream: GenerateStream, answer: Answer, token_ids: list[int]) -> None:
    async for event in stream:
        match event:
            case Delta():
                answer.chunk_seconds.append(perf_counter())
                token_ids += event.token_ids
            case Finished():
                usage = event.usage
                answer.finish_reason = event.reason.value
                answer.usage = TokenUsage(
                    usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
                )


def _fail(answer: Answer, error: EngineClientError) -> None:
    match error:
        case DeadlineExceeded():
            answer.fail(FailureKind.TIMEOUT, error.message)
        case EngineUnavailable() if answer.chunk_seconds:
            answer.fail(FailureKind.DISCONNECTED, error.message)
        case EngineUnavailable() if not error.reason:  # the transport says it, not the engine
            answer.fail(FailureKind.UNREACHABLE, error.message)
        case _:
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
            answer.fail(FailureKind.REFUSED, error.message, f"grpc_{words}")
