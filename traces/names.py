"""Span and attribute names, in one place; a test freezes them.

They follow OpenTelemetry's semantic conventions for GenAI, RPC and HTTP; what has no convention
stands under `firsttoken.`. Durations in attributes end in their unit.
"""

from __future__ import annotations

from typing import Final

# ---------------------------------------------------------------- spans of one request

# facade, in this order under its SERVER span
SPAN_READ_BODY: Final = "read_body"  # arrival to the body read
SPAN_PARSE: Final = "parse"  # JSON, fields and their ranges
SPAN_PLAN: Final = "plan"  # which model, and what of the fields goes to the engine
SPAN_RENDER: Final = "render"  # chat template
SPAN_TOKENIZE: Final = "tokenize"
SPAN_FIRST_WRITE: Final = "first_write"  # first text to its bytes in the socket

# engine, under its SERVER span
SPAN_ADMIT: Final = "admit"  # arrival at the engine to its place in the queue: checks, tokenizing
SPAN_QUEUE: Final = "queue"  # from there to its first step; an event per reason
SPAN_GRAMMAR_COMPILE: Final = "grammar_compile"  # within the queue
SPAN_PREFILL: Final = "prefill"  # first step to first token; an event per chunk
SPAN_DELIVER: Final = "deliver"  # first token computed to first token written to the caller
SPAN_DECODE: Final = "decode"  # first token to the end

EVENT_WAIT: Final = "wait"  # of queue and prefill, where it begins
EVENT_PREFILL_CHUNK: Final = "prefill_chunk"  # where it ends
EVENT_FIRST_TOKEN: Final = "first_token"
EVENT_FRAME_RECEIVED: Final = "frame_received"  # of deliver: the core's word has come
EVENT_TOKEN_TAKEN: Final = "token_taken"  # of deliver: the stream's reader has it
EVENT_PREPARED: Final = "prepared"  # the prompt is there: calls are opened from here on
EVENT_FIRST_TOKEN_RECEIVED: Final = "first_token_received"  # of a CLIENT span
EVENT_FIRST_TEXT: Final = "first_text"  # of an answer that is not streamed
EVENT_FIRST_BYTE_WRITTEN: Final = "first_byte_written"  # of a content that is streamed
EVENT_REROUTED: Final = "rerouted"  # a call left an engine that had not accepted it

# ---------------------------------------------------------------- steps, each a trace of its own

SPAN_STEP: Final = "engine.step"  # linked to the queue and prefill spans that it touched

STEP_BUDGET_TOKENS: Final = "firsttoken.step.budget_tokens"
STEP_TOKENS: Final = "firsttoken.step.tokens"
STEP_REQUESTS: Final = "firsttoken.step.requests"
STEP_PREFILL_TOKENS: Final = "firsttoken.step.prefill_tokens"
STEP_PREEMPTIONS: Final = "firsttoken.step.preemptions"
STEP_WAITING: Final = "firsttoken.step.waiting"  # samples in the queue after it was scheduled
STEP_FREE_BLOCKS: Final = "firsttoken.step.free_blocks"  # cached ones included
STEP_COMMANDS_US: Final = "firsttoken.step.commands_us"  # before it: the mailbox is emptied
STEP_SCHEDULE_US: Final = "firsttoken.step.schedule_us"
STEP_MASK_US: Final = "firsttoken.step.mask_us"
STEP_BATCH_US: Final = "firsttoken.step.batch_us"
STEP_FORWARD_US: Final = "firsttoken.step.forward_us"
STEP_SAMPLE_US: Final = "firsttoken.step.sample_us"
STEP_UPDATE_US: Final = "firsttoken.step.update_us"
# Lists of equal length, one entry a sample, the largest shares first.
STEP_SHARE_REQUESTS: Final = "firsttoken.step.share.request_ids"
STEP_SHARE_TRACES: Final = "firsttoken.step.share.trace_ids"  # empty: not traced
STEP_SHARE_TOKENS: Final = "firsttoken.step.share.tokens"
STEP_SHARE_COMPUTED: Final = "firsttoken.step.share.computed_tokens"  # before the step
STEP_SHARE_CACHED: Final = "firsttoken.step.share.cached_tokens"
STEP_SHARE_PREFILL: Final = "firsttoken.step.share.is_prefill"

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
PREFIX_HASHES: Final = "firsttoken.prefix.hashes"  # of its first 16, 32, 64, ... tokens
PREFIX_SALT: Final = "firsttoken.prefix.salt"  # a hash: equal ones share cached prefixes
FIRST_MESSAGE: Final = "firsttoken.first_message.hash"  # of a chat, before its template
FIRST_MESSAGE_CHARS: Final = "firsttoken.first_message.chars"
COMPUTED_TOKENS: Final = "firsttoken.computed_tokens"
FIRST_STEP_ID: Final = "firsttoken.first_step_id"
STEP_ID: Final = "firsttoken.step_id"
GRAMMAR_CACHED: Final = "firsttoken.grammar.cached"  # nothing was to be compiled
CHUNK_TOKENS: Final = "firsttoken.chunk_tokens"
CHUNK_STEP_TOKENS: Final = "firsttoken.chunk_step_tokens"  # of all requests in that step
CHUNK_SCHEDULE_US: Final = "firsttoken.chunk_schedule_us"  # before its duration
CHUNK_DURATION_US: Final = "firsttoken.chunk_duration_us"
WAIT_REASON: Final = (
    "firsttoken.wait.reason"  # running_step, to_core, or one of the core's (WaitReason)
)
WAIT_DURATION_US: Final = "firsttoken.wait.duration_us"
PREFILL_CHUNKS: Final = "firsttoken.prefill_chunks"
PREEMPTIONS: Final = "firsttoken.preemptions"
FINISH_REASON: Final = "firsttoken.finish_reason"
REROUTE_REASON: Final = "firsttoken.reroute.reason"
