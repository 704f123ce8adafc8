"""What can be set, each with its unit and default; flags carry the same names."""

from __future__ import annotations

from pathlib import Path

import msgspec

from access.keys import ApiKey


class ModelConfig(msgspec.Struct, frozen=True):
    model_dir: str  # a directory with config.json, *.safetensors, tokenizer.json
    served_model_name: str
    device: str = "auto"  # auto, cpu, cuda
    dtype: str = "auto"  # auto, float32, bfloat16, float16; auto: float32 on a CPU
    load_format: str = "auto"  # auto: the directory's safetensors; dummy: random numbers
    quantization: str = "auto"  # auto, none, int8, int4, fp8; see decoder_loader.py
    kernels: str = "auto"  # auto, cpu, triton, reference
    max_model_len: int | None = None  # tokens; None: the model's
    batch_invariant: bool = False  # a token's bits don't depend on what else a step computes
    generation_config: str = "auto"  # auto: sampling defaults are the model's; none, vllm: neutral


class CacheConfig(msgspec.Struct, frozen=True):
    block_size: int = 16  # tokens
    kv_cache_memory_bytes: int | None = None  # None: by the arithmetic of `kv_cache_pool.py`
    gpu_memory_utilization: float = 0.9  # share of a CUDA device for weights and KV cache
    num_blocks: int | None = None  # overrides the memory arithmetic
    kv_cache_dtype: str = "auto"  # auto: float16 on the CPU kernels, else the model's dtype
    enable_prefix_caching: bool = True


class SchedulerConfig(msgspec.Struct, frozen=True):
    max_num_seqs: int = 64  # samples running at once; 0: as suits the device
    # A step's token budget, which bounds the gap between two tokens; 0: as suits the device.
    max_num_batched_tokens: int = 128
    max_num_queued_reqs: int = 1024  # samples waiting
    max_num_queued_tokens: int = 4_000_000  # prompt tokens waiting
    max_output_tokens: int | None = None  # cap per sample; None: the context
    max_samples: int = 128  # cap on n
    max_queue_wait_seconds: float | None = None  # a longer predicted wait is refused at the door
    queue_timeout_seconds: float | None = None  # nothing of a request ran by then: it fails
    long_prefill_token_threshold: int = 0  # longest chunk of one prompt in a step; 0: the budget
    target_itl_ms: float | None = None  # prompts leave running streams that pace; None: no target
    tenant_weights: dict[str, float] = {}  # shares of the tokens; who isn't named weighs 1
    priority_aging_seconds: float = 30.0  # of waiting, which make up for one unit of priority
    enable_jump_forward: bool = True  # a token that is the only one allowed takes no step
    priority_range: int = 10  # a request's priority is clamped to [-range, range]

    @property
    def max_num_running(self) -> int:
        """Samples; each can be given its last token in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


class GrammarConfig(msgspec.Struct, frozen=True):
    compile_timeout_seconds: float = 10.0  # of processor time, for one grammar
    compile_memory_bytes: int = 1024**3


class CoreConfig(msgspec.Struct, frozen=True):
    """All that the core process needs."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    grammar: GrammarConfig = GrammarConfig()
    num_threads: int | None = None  # of the compute kernels; None: torch's choice
    check_integrity: bool = False  # re-derive the KV bookkeeping whenever the core falls idle


class EdgeConfig(msgspec.Struct, frozen=True):
    """Who may reach the gRPC edge. No keys of any kind: no key is asked for."""

    api_keys: tuple[ApiKey, ...] = ()
    api_keys_file: Path | None = None
    trusted_key_digest: bytes = b""  # SHA-256 of the facade's key; empty: there is none
    ssl_certfile: Path | None = None  # None: plain text
    ssl_keyfile: Path | None = None
    ssl_ca_certs: Path | None = None  # clients need a certificate of these; None: they need none


class ServiceConfig(msgspec.Struct, frozen=True):
    """The engine service around the core."""

    core: CoreConfig
    grpc_host: str = "127.0.0.1"
    grpc_port: int = 50051  # 0: any free port
    metrics_port: int = 8001  # 0: any free port
    max_message_bytes: int = 64 * 1024 * 1024
    shutdown_timeout_seconds: float = 30.0  # grace for running requests on SIGTERM
    slow_reader_timeout_seconds: float = 60.0
    stall_timeout_seconds: float = 10.0  # no sign of life from the core: not serving
    stall_restart_seconds: float = 300.0  # nor for that long: it is killed and replaced
    trace_dir: str | None = None  # local store; None: none
    otlp_traces_endpoint: str | None = None
    trace_sample_ratio: float = 1.0  # of traces started here; others follow their parent
    trace_slow_ttft_ms: float = 1000.0  # those started here are kept all the same; 0: none
    admin_key_digest: bytes = b""  # SHA-256 of Control's credential; empty: Control is closed
    edge: EdgeConfig = EdgeConfig()
    core_in_process: bool = False  # a thread in place of a process, for tests and tiny machines
    log_level: str = "info"
