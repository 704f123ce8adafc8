"""Between the types of `clients.types` and protobuf, in the direction a caller needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from clients.errors import FieldViolation, InternalError, InvalidRequest
from clients.types import (
    Accepted,
    Delta,
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    GenerationDefaults,
    LoadReport,
    ModelInfo,
    PrefillProgress,
    SamplingParams,
    ServerInfo,
    StoppingCriteria,
    StructuredOutput,
    Timing,
    TokenLogprobs,
    Usage,
    Wait,
)
from protos import engine_pb2

_FINISH_REASONS = {
    engine_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    engine_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    engine_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}

_MICROSECOND = 1e-6

T = TypeVar("T")

# ---------------------------------------------------------------- requests


def request_to_proto(request: GenerateRequest, request_id: str) -> engine_pb2.GenerateRequest:
    """Raises InvalidRequest, naming the field, for what protobuf cannot carry.

    Everything else is the engine's to judge: it knows the limits.
    """
    message = engine_pb2.GenerateRequest(
        request_id=_carried("request_id", _printable_ascii, request_id)
    )
    if isinstance(request.prompt, str):
        _carried("prompt", setattr, message, "text", request.prompt)
    else:
        _carried("prompt", message.token_ids.ids.extend, request.prompt)
        message.token_ids.SetInParent()  # an empty list of ids is still token ids
    message.sampling.CopyFrom(_sampling_to_proto(request.sampling))
    message.stopping.CopyFrom(_stopping_to_proto(request.stopping))
    if request.structured_output is not None:
        message.structured_output.CopyFrom(_structured_output_to_proto(request.structured_output))
    if request.num_logprobs is not None:
        _carried("num_logprobs", setattr, message.response, "logprobs", request.num_logprobs)
    if request.num_prompt_logprobs is not None:
        number = request.num_prompt_logprobs
        _carried("num_prompt_logprobs", setattr, message.response, "prompt_logprobs", number)
    if request.tells_timing:
        message.response.timing = True
    if request.cache_salt:
        _carried("cache_salt", setattr, message.kv, "cache_salt", request.cache_salt)
    if request.priority is not None:
        _carried("priority", setattr, message, "priority", request.priority)
    _carried("model", setattr, message, "model", request.model)
    _carried("tenant", setattr, message, "tenant", request.tenant)
    if request.attempt is not None:
        _carried("attempt", setattr, message, "attempt", request.attempt)
    _carried("tokenizer_digest", setattr, message, "tokenizer_digest", request.tokenizer_digest)
    return message


def _sampling_to_proto(sampling: SamplingParams) -> engine_pb2.SamplingParams:
    message = engine_pb2.SamplingParams()
    _set_fields(
        message,
        "sampling",
        (
            ("temperature", sampling.temperature),
            ("top_p", sampling.top_p),
            ("top_k", sampling.top_k),
            ("min_p", sampling.min_p),
            ("repetition_penalty", sampling.repetition_penalty),
            ("presence_penalty", sampling.presence_penalty),
            ("frequency_penalty", sampling.frequency_penalty),
            ("seed", sampling.seed),
            ("n", sampling.n),
        ),
    )
    _carried("sampling.logit_bias", message.logit_bias.update, sampling.logit_bias)
    _carried(
        "sampling.allowed_token_ids", message.allowed_token_ids.extend, sampling.allowed_token_ids
    )
    for token_ids in sampling.bad_token_sequences:
        sequence = message.bad_token_sequences.add()
        _carried("sampling.bad_token_sequences", sequence.ids.extend, token_ids)
    return message


def _stopping_to_proto(stopping: StoppingCriteria) -> engine_pb2.StoppingCriteria:
    message = engine_pb2.StoppingCriteria()
    _set_fields(
        message,
        "stopping",
        (
            ("max_tokens", stopping.max_tokens),
            ("min_tokens", stopping.min_tokens),
            ("ignore_eos", stopping.ignore_eos),
        ),
    )
    _carried("stopping.stop_token_ids", message.stop_token_ids.extend, stopping.stop_token_ids)
    return message


def _structured_output_to_proto(
    structured_output: StructuredOutput,
) -> engine_pb2.StructuredOutput:
    given = structured_output
    constraints = (
        ("json_schema", given.json_schema),
        ("json_object", given.json_object or None),
        ("regex", given.regex),
        ("grammar", given.grammar),
        ("structural_tag", given.structural_tag),
    )
    num_set = sum(value is not None for _, value in constraints) + bool(given.choice)
    if num_set != 1:
        raise _invalid("structured_output", "set exactly one constraint")
    message = engine_pb2.StructuredOutput(relax_unenforced=given.relax_unenforced)
    _set_fields(message, "structured_output", constraints)
    if given.choice:
        _carried("structured_output.choice", message.choice.values.extend, given.choice)
    return message


_Group = engine_pb2.SamplingParams | engine_pb2.StoppingCriteria | engine_pb2.StructuredOutput


def _set_fields(
    message: _Group, group: str, values: Iterable[tuple[str, str | float | None]]
) -> None:
    """Sets what is not None; `group` is how the caller names the message."""
    for name, value in values:
        if value is not None:
            _carried(f"{group}.{name}", setattr, message, name, value)


def _printable_ascii(text: str) -> str:
    """Ids also travel as metadata, which carries nothing else."""
    if not all("!" <= character <= "~" for character in text):
        raise ValueError("must be printable ASCII without spaces")
    return text


def _carried(field: str, put: Callable[..., T], *values: object) -> T:
    try:
        return put(*values)
    except UnicodeError:
        raise _invalid(field, "is not valid Unicode") from None
    except (TypeError, ValueError) as error:
        raise _invalid(field, str(error)) from None


def _invalid(field: str, description: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: {description}",
        reason="INVALID_VALUE",
        field_violations=(FieldViolation(field, description),),
    )


# ---------------------------------------------------------------- events


def event_from_proto(message: engine_pb2.GenerateEvent) -> GenerateEvent | None:
    """None for an event of a newer engine, which an older client skips."""
    match message.WhichOneof("event"):
        case "delta":
            delta = message.delta
            return Delta(
                index=message.index,
                token_ids=tuple(delta.token_ids),
                logprobs=tuple(map(_logprobs_from_proto, delta.logprobs)),
                timing=_timing_from_proto(delta.timing) if delta.HasField("timing") else None,
            )
        case "prefill_progress":
            progress = message.prefill_progress
            return PrefillProgress(
                index=message.index,
                prompt_tokens=progress.prompt_tokens,
                computed_tokens=progress.computed_tokens,
                cached_tokens=progress.cached_tokens,
                prompt_logprobs=tuple(map(_logprobs_from_proto, progress.prompt_logprobs)),
            )
        case "finished":
            return _finished_from_proto(message.index, message.finished)
        case "accepted":
            accepted = message.accepted
            return Accepted(
                request_id=accepted.request_id,
                prompt_tokens=accepted.prompt_tokens,
                max_tokens=accepted.max_tokens,
                relaxed=tuple(accepted.relaxed),
            )
        case _:
            return None


def _logprobs_from_proto(message: engine_pb2.TokenLogprobs) -> TokenLogprobs:
    if len(message.top_token_ids) != len(message.top_logprobs):
        raise InternalError("the engine sent log probabilities that match no tokens")
    return TokenLogprobs(
        logprob=message.logprob,
        rank=message.rank,
        top=tuple(zip(message.top_token_ids, message.top_logprobs, strict=True)),
    )


def _finished_from_proto(index: int, message: engine_pb2.Finished) -> Finished:
    reason = _FINISH_REASONS.get(message.reason)
    if reason is None:
        raise InternalError(f"the engine gave an unknown finish reason ({message.reason})")
    return Finished(
        index=index,
        reason=reason,
        usage=Usage(
            prompt_tokens=message.usage.prompt_tokens,
            cached_tokens=message.usage.cached_tokens,
            completion_tokens=message.usage.completion_tokens,
        ),
        timing=_timing_from_proto(message.timing),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
    )


def _timing_from_proto(message: engine_pb2.Timing) -> Timing:
    return Timing(
        queue_seconds=message.queue_us * _MICROSECOND,
        grammar_wait_seconds=message.grammar_wait_us * _MICROSECOND,
        prefill_seconds=message.prefill_us * _MICROSECOND,
        first_token_seconds=message.first_token_us * _MICROSECOND,
        decode_seconds=message.decode_us * _MICROSECOND,
        prefill_chunks=message.prefill_chunks,
        cached_tokens=message.cached_tokens,
        preemptions=message.preemptions,
        first_step_id=message.first_step_id,
        waits=tuple(
            Wait(_reason_name(wait.reason), wait.duration_us * _MICROSECOND)
            for wait in message.waits
        ),
    )


def _reason_name(reason: engine_pb2.WaitReason.ValueType) -> str:
    """That of a newer engine has none here."""
    if reason not in engine_pb2.WaitReason.values():
        return "unknown"
    return engine_pb2.WaitReason.Name(reason).removeprefix("WAIT_REASON_").lower()


# ---------------------------------------------------------------- about the engine


def model_info_from_proto(message: engine_pb2.ModelInfo) -> ModelInfo:
    defaults = message.generation_defaults
    return ModelInfo(
        model=message.model,
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        tokenizer_digest=message.tokenizer_digest,
        weights_digest=message.weights_digest,
        generation_defaults=GenerationDefaults(
            temperature=defaults.temperature if defaults.HasField("temperature") else None,
            top_p=defaults.top_p if defaults.HasField("top_p") else None,
            top_k=defaults.top_k if defaults.HasField("top_k") else None,
            min_p=defaults.min_p if defaults.HasField("min_p") else None,
            repetition_penalty=(
                defaults.repetition_penalty if defaults.HasField("repetition_penalty") else None
            ),
        ),
        max_output_tokens=message.max_output_tokens,
        max_samples=message.max_samples,
        created_unix_seconds=message.created_unix_seconds,
        max_queued_samples=message.max_queued_samples,
        max_queued_tokens=message.max_queued_tokens,
    )


def server_info_from_proto(message: engine_pb2.ServerInfo) -> ServerInfo:
    return ServerInfo(
        version=message.version,
        api_version=message.api_version,
        device=message.device,
        dtype=message.dtype,
        quantization=message.quantization,
        kv_cache_dtype=message.kv_cache_dtype,
        op_backends=dict(message.op_backends),
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        start_unix_nanos=message.start_unix_nanos,
        core_starts=message.core_starts,
        core_pid=message.core_pid,
        batch_invariant=message.batch_invariant,
    )


def load_report_from_proto(message: engine_pb2.LoadReport) -> LoadReport:
    return LoadReport(
        ready=message.ready,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        total_blocks=message.total_blocks,
        free_blocks=message.free_blocks,
        cached_blocks=message.cached_blocks,
        used_blocks=message.used_blocks,
        num_steps=message.num_steps,
        prompt_tokens=message.prompt_tokens,
        generated_tokens=message.generated_tokens,
        num_preemptions=message.num_preemptions,
        prefix_cache_queries=message.prefix_cache_queries,
        prefix_cache_hits=message.prefix_cache_hits,
        num_requests=message.num_requests,
    )
