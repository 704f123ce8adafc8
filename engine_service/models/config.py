"""A model's config.json, read into what the decoder needs; no transformers.

Defaults are those that transformers gives a missing key, by architecture. What the decoder cannot
compute exactly is refused by name, never approximated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine_service.model_error import ModelError
from engine_service.models.registry import SUPPORTED_ARCHITECTURES


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary frequencies: theta^(-2i/D), then scaled as `kind` says."""

    kind: str  # default, linear, llama3
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    original_max_position: int = 0  # llama3, tokens


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # tokens
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # query and key heads normalised before rotation
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]  # tokens, per layer; None: sees everything
    dtype: str  # the checkpoint's
    eos_token_ids: tuple[int, ...]


class _RopeFields(msgspec.Struct, frozen=True):
    rope_type: str | None = None
    type: str | None = None  # the older spelling
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    full_attention: dict[str, object] | None = None  # per-layer-type parameters
    sliding_attention: dict[str, object] | None = None


class _ConfigFile(msgspec.Struct, frozen=True):
    """config.json as it lies on disk; keys not named here do not change the arithmetic."""

    architectures: list[str]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: _RopeFields | None = None
    rope_parameters: _RopeFields | None = None
    partial_rotary_factor: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, object] | None = None


@dataclass(frozen=True, slots=True)
class _Family:
    """Where the architectures differ."""

    default_kv_heads: int | None  # None: as many as query heads
    default_max_position: int  # tokens
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qkv_bias: bool | None = None  # None: `attention_bias` says
    output_bias: bool | None = None
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    default_window: int | None = None  # tokens, when the key is missing
    window_is_opt_in: bool = False  # `use_sliding_window`, from layer `max_window_layers` on


_FAMILIES = {
    "LlamaForCausalLM": _Family(None, 2048, reads_mlp_bias=True),
    "MistralForCausalLM": _Family(
        8, 4096 * 32, qkv_bias=False, output_bias=False, default_window=4096
    ),
    "Qwen2ForCausalLM": _Family(
        32, 32768, qkv_bias=True, output_bias=False, default_window=4096, window_is_opt_in=True
    ),
    "Qwen3ForCausalLM": _Family(
        32, 32768, default_head_dim=128, qk_norm=True, default_window=4096, window_is_opt_in=True
    ),
}


def read_config(model_dir: Path) -> DecoderConfig:
    """Raises ModelError on a file that is missing, malformed or asks for what is not supported."""
    path = model_dir / "config.json"
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_ConfigFile)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except msgspec.DecodeError as error:
        raise ModelError(f"{path} is not a usable model configuration: {error}.") from error
    return _decoder_config(file, _architecture(file), path)


def read_eos_token_ids(model_dir: Path, config: DecoderConfig) -> tuple[int, ...]:
    """Every id that ends an answer: generation_config.json's, else config.json's."""
    path = model_dir / "generation_config.json"
    if not path.exists():
        return config.eos_token_ids
    try:
        value = json.loads(path.read_bytes()).get("eos_token_id")
        ids = msgspec.convert(value, type=int | list[int] | None)
    except (ValueError, AttributeError, msgspec.ValidationError) as error:
        raise ModelError(f"{path} is not a usable generation configuration: {error}.") from error
    return config.eos_token_ids if ids is None else _id_tuple(ids)


def _architecture(file: _ConfigFile) -> str:
    for name in file.architectures:
        if name in SUPPORTED_ARCHITECTURES:
            return name
    raise ModelError(
        f"The architecture {', '.join(file.architectures) or '(none)'} is not supported; "
        f"supported are {', '.join(sorted(SUPPORTED_ARCHITECTURES))}."
    )


def _decoder_config(file: _ConfigFile, architecture: str, path: Path) -> DecoderConfig:
    family = _FAMILIES[architecture]
    _refuse_unsupported(file, path)
    num_heads = file.num_attention_heads
    num_kv_heads = file.num_key_value_heads or family.default_kv_heads or num_heads
    max_position = file.max_position_embeddings or family.default_max_position
    sizes = (file.vocab_size, file.hidden_size, file.intermediate_size, file.num_hidden_layers)
    if min(*sizes, num_heads, num_kv_heads, max_position) < 1:
        raise ModelError(f"{path} has a size below 1.")
    head_dim = file.head_dim or family.default_head_dim or file.hidden_size // num_heads
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"{path}: {num_heads} attention heads cannot share {num_kv_heads} key-value heads of "
            f"{head_dim} dimensions."
        )
    return DecoderConfig(
        architecture=architecture,
        vocab_size=file.vocab_size,
        hidden_size=file.hidden_size,
        intermediate_size=file.intermediate_size,
        num_layers=file.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rms_norm_eps=file.rms_norm_eps,
        rope=_rope(file, max_position, path),
        qkv_bias=file.attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=file.attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=file.mlp_bias and family.reads_mlp_bias,
        qk_norm=family.qk_norm,
        tie_word_embeddings=file.tie_word_embeddings,
        sliding_windows=_sliding_windows(file, family, path),
        dtype=file.dtype or file.torch_dtype or "float32",
        eos_token_ids=() if file.eos_token_id is None else _id_tuple(file.eos_token_id),
    )


def _refuse_unsupported(file: _ConfigFile, path: Path) -> None:
    if file.quantization_config is not None:
        raise ModelError(f"{path}: a checkpoint with quantized weights is not supported.")
    if file.hidden_act != "silu":
        raise ModelError(f"{path}: the activation {file.hidden_act!r} is not supported, only silu.")


def _rope(file: _ConfigFile, max_position: int, path: Path) -> RopeConfig:
    fields = file.rope_parameters or file.rope_scaling or _RopeFields()
    kind = fields.rope_type or fields.type or "default"
    theta = fields.rope_theta or file.rope_theta or 10_000.0
    if fields.full_attention is not None or fields.sliding_attention is not None:
        raise ModelError(f"{path}: rope parameters per layer type are not supported.")
    if (fields.partial_rotary_factor or file.partial_rotary_factor or 1.0) != 1.0:
        raise ModelError(f"{path}: partial rotary embedding is not supported.")
    if kind == "default":
        return RopeConfig(kind, theta)
    if kind == "linear" and fields.factor:
        return RopeConfig(kind, theta, fields.factor)
    if kind == "llama3" and fields.factor and fields.low_freq_factor and fields.high_freq_factor:
        return RopeConfig(
            kind,
            theta,
            fields.factor,
            fields.low_freq_factor,
            fields.high_freq_factor,
            fields.original_max_position_embeddings or max_position,
        )
    if kind in ("linear", "llama3"):
        raise ModelError(f"{path}: the rope type {kind!r} lacks some of its factors.")
    raise ModelError(
        f"{path}: the rope type {kind!r} is not supported; supported are default, linear, llama3."
    )


def _sliding_windows(file: _ConfigFile, family: _Family, path: Path) -> tuple[int | None, ...]:
    window = family.default_window if file.sliding_window is msgspec.UNSET else file.sliding_window
    layers = range(file.num_hidden_layers)
    if family.default_window is None or (family.window_is_opt_in and not file.use_sliding_window):
        return tuple(None for _ in layers)
    if window is not None and window < 1:
        raise ModelError(f"{path}: sliding_window must be at least 1.")
    if not family.window_is_opt_in:
        return tuple(window for _ in layers)
    if file.layer_types is None:
        return tuple(window if i >= file.max_window_layers else None for i in layers)
    if len(file.layer_types) != file.num_hidden_layers:
        raise ModelError(f"{path}: layer_types does not name every layer.")
    return tuple(window if kind == "sliding_attention" else None for kind in file.layer_types)


def _id_tuple(ids: int | list[int]) -> tuple[int, ...]:
    return (ids,) if isinstance(ids, int) else tuple(ids)
