"""What the edge knows of the model it serves: limits, defaults and names; no weights."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Final

from engine_service.config import CoreConfig, ModelConfig
from engine_service.messages import Ready
from engine_service.model_error import ModelError
from engine_service.tokenizer_files import TokenizerFiles

_GENERATION_CONFIG: Final = "generation_config.json"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The model's generation config; None: it has none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    vocab_size: int
    max_model_len: int  # tokens, effective
    eos_token_ids: tuple[int, ...]
    tokenizer_digest: str
    defaults: GenerationDefaults
    max_output_tokens: int  # per sample
    max_samples: int
    priority_range: int  # priorities are clamped to [-range, range]


def describe_model(config: CoreConfig, ready: Ready, files: TokenizerFiles) -> ServedModel:
    """Raises ModelError for a generation config that can't be read."""
    limits = config.scheduler
    return ServedModel(
        name=config.model.served_model_name,
        vocab_size=ready.vocab_size,
        max_model_len=ready.max_model_len,
        eos_token_ids=ready.eos_token_ids,
        tokenizer_digest=files.digest,
        defaults=sampling_defaults(config.model, files),
        max_output_tokens=min(limits.max_output_tokens or ready.max_model_len, ready.max_model_len),
        max_samples=min(limits.max_samples, limits.max_num_queued_reqs),
        priority_range=limits.priority_range,
    )


def sampling_defaults(config: ModelConfig, files: TokenizerFiles) -> GenerationDefaults:
    """Raises ModelError for a generation config that can't be read."""
    if config.generation_config != "auto":
        return GenerationDefaults()
    return read_generation_defaults(files.content(_GENERATION_CONFIG))


def read_generation_defaults(content: bytes | None) -> GenerationDefaults:
    if content is None:
        return GenerationDefaults()
    try:
        fields = json.loads(content)
    except ValueError as error:
        raise ModelError(f"{_GENERATION_CONFIG} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{_GENERATION_CONFIG} does not hold an object")
    top_k = _number(fields, "top_k")
    return GenerationDefaults(
        temperature=_number(fields, "temperature"),
        top_p=_number(fields, "top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=_number(fields, "min_p"),
        repetition_penalty=_number(fields, "repetition_penalty"),
    )


def _number(fields: dict[str, object], name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"{_GENERATION_CONFIG}: {name} must be a number, not {value!r}")
    return value
