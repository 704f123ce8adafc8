"""The engine's direction of `clients.conversions`: requests in, events and errors out."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from clients.errors import EngineClientError
from clients.status import ERROR_DOMAIN, ERRORS_BY_REASON, STATUS_DETAILS_KEY
from clients.types import (
    FinishReason,
    GenerateRequest,
    LoadReport,
    ModelInfo,
    SamplingParams,
    ServerInfo,
    StoppingCriteria,
    StructuredOutput,
    Timing,
    TokenLogprobs,
    Usage,
)
from protos import engine_pb2

_FINISH_REASONS = {
    FinishReason.STOP: engine_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: engine_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: engine_pb2.FINISH_REASON_ABORT,
}

_REASONS_BY_TYPE = {error_type: reason for reason, (error_type, _) in ERRORS_BY_REASON.items()}


def request_from_proto(message: engine_pb2.GenerateRequest) -> GenerateRequest:
    """Floats come back as their nearest 32-bit value."""
    is_text = message.WhichOneof("prompt") == "text"
    response = message.response
    return GenerateRequest(
        prompt=message.text if is_text else tuple(message.token_ids.ids),
        request_id=message.request_id,
        model=message.model,
        sampling=_sampling_from_proto(message.sampling),
        stopping=_stopping_from_proto(message.stopping),
        structured_output=_structured_output_from_proto(message.structured_output),
        num_logprobs=response.logprobs if response.HasField("logprobs") else None,
        num_prompt_logprobs=(
            response.prompt_logprobs if response.HasField("prompt_logprobs") else None
        ),
        tells_timing=response.timing,
        cache_salt=message.kv.cache_salt,
        priority=message.priority if message.HasField("priority") else None,
        tenant=message.tenant,
        attempt=message.attempt if message.HasField("attempt") else None,
        tokenizer_digest=message.tokenizer_digest,
    )


def _sampling_from_proto(message: engine_pb2.SamplingParams) -> SamplingParams:
    has = message.HasField
    return SamplingParams(
        temperature=message.temperature if has("temperature") else None,
        top_p=message.top_p if has("top_p") else None,
        top_k=message.top_k if has("top_k") else None,
        min_p=message.min_p if has("min_p") else None,
        repetition_penalty=message.repetition_penalty if has("repetition_penalty") else None,
        presence_penalty=message.presence_penalty if has("presence_penalty") else None,
        frequency_penalty=message.frequency_penalty if has("frequency_penalty") else None,
        logit_bias=dict(message.logit_bias),
        seed=message.seed if has("seed") else None,
        n=message.n if has("n") else None,
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_token_sequences=tuple(tuple(item.ids) for item in message.bad_token_sequences),
    )


def _stopping_from_proto(message: engine_pb2.StoppingCriteria) -> StoppingCriteria:
    return StoppingCriteria(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens if message.HasField("min_tokens") else None,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos if message.HasField("ignore_eos") else None,
    )


def _structured_output_from_proto(
    message: engine_pb2.StructuredOutput,
) -> StructuredOutput | None:
    kind = message.WhichOneof("constraint")
    if kind is None:
        return None
    return StructuredOutput(
        json_schema=message.json_schema if kind == "json_schema" else None,
        json_object=message.json_object,
        regex=message.regex if kind == "regex" else None,
        grammar=message.grammar if kind == "grammar" else None,
        choice=tuple(message.choice.values),
        structural_tag=message.structural_tag if kind == "structural_tag" else None,
        relax_unenforced=message.relax_unenforced,
    )


# ---------------------------------------------------------------- events


def delta_to_proto(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> engine_pb2.Delta:
    return engine_pb2.Delta(
        token_ids=token_ids, logprobs=[logprobs_to_proto(entry) for entry in logprobs]
    )


def logprobs_to_proto(logprobs: TokenLogprobs) -> engine_pb2.TokenLogprobs:
    return engine_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def finished_to_proto(
    reason: FinishReason, stop_token_id: int | None, usage: Usage, timing: Timing
) -> engine_pb2.Finished:
    return engine_pb2.Finished(
        reason=_FINISH_REASONS[reason],
        stop_token_id=stop_token_id,
        usage=engine_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        ),
        timing=timing_to_proto(timing),
    )


def timing_to_proto(timing: Timing) -> engine_pb2.Timing:
    return engine_pb2.Timing(
        queue_us=_micros(timing.queue_seconds),
        grammar_wait_us=_micros(timing.grammar_wait_seconds),
        prefill_us=_micros(timing.prefill_seconds),
        first_token_us=_micros(timing.first_token_seconds),
        decode_us=_micros(timing.decode_seconds),
        prefill_chunks=timing.prefill_chunks,
        cached_tokens=timing.cached_tokens,
        preemptions=timing.preemptions,
        first_step_id=timing.first_step_id,
        waits=[
            engine_pb2.Wait(
                reason=engine_pb2.WaitReason.Value(f"WAIT_REASON_{wait.reason.upper()}"),
                duration_us=_micros(wait.seconds),
            )
            for wait in timing.waits
        ],
    )


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


# ---------------------------------------------------------------- errors


def status_code(error: EngineClientError) -> grpc.StatusCode:
    _, code = ERRORS_BY_REASON[error_reason(error)]
    return code


def status_details(error: EngineClientError) -> tuple[str, bytes]:
    """The trailing metadata that makes a status a rich one."""
    status = status_pb2.Status(code=status_code(error).value[0], message=error.message)
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(domain=ERROR_DOMAIN, reason=error_reason(error))
    )
    if error.retry_after_seconds is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_seconds * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if error.field_violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in error.field_violations:
            bad_request.field_violations.add(
                field=violation.field, description=violation.description
            )
        status.details.add().Pack(bad_request)
    return STATUS_DETAILS_KEY, status.SerializeToString()


def error_reason(error: EngineClientError) -> str:
    """That of the error, or its type's."""
    return error.reason or _REASONS_BY_TYPE.get(type(error), "INTERNAL_ERROR")


# ---------------------------------------------------------------- about the engine


def model_info_to_proto(info: ModelInfo) -> engine_pb2.ModelInfo:
    defaults = info.generation_defaults
    return engine_pb2.ModelInfo(
        model=info.model,
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        tokenizer_digest=info.tokenizer_digest,
        weights_digest=info.weights_digest,
        generation_defaults=engine_pb2.GenerationDefaults(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        ),
        max_output_tokens=info.max_output_tokens,
        max_samples=info.max_samples,
        created_unix_seconds=info.created_unix_seconds,
        max_queued_samples=info.max_queued_samples,
        max_queued_tokens=info.max_queued_tokens,
    )


def server_info_to_proto(info: ServerInfo) -> engine_pb2.ServerInfo:
    return engine_pb2.ServerInfo(
        version=info.version,
        api_version=info.api_version,
        device=info.device,
        dtype=info.dtype,
        quantization=info.quantization,
        kv_cache_dtype=info.kv_cache_dtype,
        op_backends=info.op_backends,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        start_unix_nanos=info.start_unix_nanos,
        core_starts=info.core_starts,
        core_pid=info.core_pid,
        batch_invariant=info.batch_invariant,
    )


def load_report_to_proto(report: LoadReport) -> engine_pb2.LoadReport:
    return engine_pb2.LoadReport(
        ready=report.ready,
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        total_blocks=report.total_blocks,
        free_blocks=report.free_blocks,
        cached_blocks=report.cached_blocks,
        used_blocks=report.used_blocks,
        num_steps=report.num_steps,
        prompt_tokens=report.prompt_tokens,
        generated_tokens=report.generated_tokens,
        num_preemptions=report.num_preemptions,
        prefix_cache_queries=report.prefix_cache_queries,
        prefix_cache_hits=report.prefix_cache_hits,
        num_requests=report.num_requests,
    )
