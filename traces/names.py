"""Span and attribute names, in one place; a test freezes them.

They follow OpenTelemetry's semantic conventions for GenAI, RPC and HTTP; what has no convention
stands under `firsttoken.`. Durations in attributes end in their unit.
"""

from __future__ import annotations

from typing import Final

# ---------------------------------------------------------------- spans of one request

SPAN_RENDER: Final = "render"  # chat template
SPAN_TOKENIZE: Final = "tokenize"
SPAN_QUEUE: Final = "queue"  # arrival at the engine to its first step
SPAN_GRAMMAR_COMPILE: Final = "grammar_compile"
SPAN_PREFILL: Final = "prefill"  # first step to first token; an event per chunk
SPAN_DECODE: Final = "decode"  # first token to the end

EVENT_PREFILL_CHUNK: Final = "prefill_chunk"
EVENT_FIRST_TOKEN: Final = "first_token"
EVENT_FIRST_BYTE_WRITTEN: Final = "first_byte_written"

# ---------------------------------------------------------------- GenAI

GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"  # chat, text_completion
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

# ---------------------------------------------------------------- RPC and HTTP

RPC_SYSTEM: Final = "rpc.system"
RPC_SERVICE: Final = "rpc.service"
RPC_METHOD: Final = "rpc.method"
RPC_GRPC_STATUS_CODE: Final = "rpc.grpc.status_code"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
HTTP_REQUEST_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_RESPONSE_STATUS_CODE: Final = "http.response.status_code"
URL_PATH: Final = "url.path"
ERROR_TYPE: Final = "error.type"

# ---------------------------------------------------------------- ours

REQUEST_ID: Final = "firsttoken.request.id"
SAMPLE_INDEX: Final = "firsttoken.sample.index"
STREAM: Final = "firsttoken.request.stream"
PROMPT_TOKENS: Final = "firsttoken.prompt_tokens"
CACHED_TOKENS: Final = "firsttoken.cached_tokens"
COMPUTED_TOKENS: Final = "firsttoken.computed_tokens"
FIRST_STEP_ID: Final = "firsttoken.first_step_id"
STEP_ID: Final = "firsttoken.step_id"
CHUNK_TOKENS: Final = "firsttoken.chunk_tokens"
CHUNK_DURATION_US: Final = "firsttoken.chunk_duration_us"
PREFILL_CHUNKS: Final = "firsttoken.prefill_chunks"
PREEMPTIONS: Final = "firsttoken.preemptions"
FINISH_REASON: Final = "firsttoken.finish_reason"
