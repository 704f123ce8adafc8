"""What GetModelInfo and GetServerInfo answer."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Final

from engine_service.config import CoreConfig
from engine_service.core_supervisor import CoreSupervisor
from engine_service.errors import EngineUnavailable
from engine_service.messages import Ready
from engine_service.served_model import ServedModel, describe_model
from engine_service.tokenizer_files import TokenizerFiles
from protos import engine_pb2 as pb

API_VERSION: Final = "1.0"  # major: incompatible, minor: added


class EngineInfo:
    """Known from the first core's Ready on, and told anew by each later one."""

    def __init__(
        self, config: CoreConfig, files: TokenizerFiles, supervisor: CoreSupervisor
    ) -> None:
        self._config = config
        self._files = files
        self._supervisor = supervisor
        self._start_unix_nanos = time.time_ns()
        self._known: tuple[ServedModel, Ready] | None = None

    def core_is_known(self, ready: Ready) -> None:
        self._known = (describe_model(self._config, ready, self._files), ready)

    @property
    def model(self) -> ServedModel:
        return self._get()[0]

    def model_info(self) -> pb.ModelInfo:
        model, ready = self._get()
        defaults = pb.GenerationDefaults(
            temperature=model.defaults.temperature,
            top_p=model.defaults.top_p,
            top_k=model.defaults.top_k,
            min_p=model.defaults.min_p,
            repetition_penalty=model.defaults.repetition_penalty,
        )
        return pb.ModelInfo(
            model=model.name,
            architecture=ready.architecture,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            tokenizer_digest=model.tokenizer_digest,
            weights_digest=ready.weights_digest,
            generation_defaults=defaults,
            max_output_tokens=model.max_output_tokens,
            max_samples=model.max_samples,
            created_unix_seconds=self._start_unix_nanos // 1_000_000_000,
            max_queued_samples=self._config.scheduler.max_num_queued_reqs,
            max_queued_tokens=self._config.scheduler.max_num_queued_tokens,
        )

    def server_info(self) -> pb.ServerInfo:
        _, ready = self._get()
        config = self._config
        return pb.ServerInfo(
            version=importlib.metadata.version("firsttoken"),
            api_version=API_VERSION,
            device=ready.device,
            dtype=ready.dtype,
            quantization=ready.quantization,
            kv_cache_dtype=ready.kv_cache_dtype,
            op_backends=ready.op_backends,
            block_size=config.cache.block_size,
            num_blocks=ready.num_blocks,
            max_num_seqs=ready.max_num_seqs,
            max_num_batched_tokens=ready.max_num_batched_tokens,
            start_unix_nanos=self._start_unix_nanos,
            core_starts=self._supervisor.num_starts,
            core_pid=self._supervisor.core_pid,
            batch_invariant=ready.batch_invariant,
        )

    def _get(self) -> tuple[ServedModel, Ready]:
        if self._known is None:
            raise EngineUnavailable("the engine is loading", retry_after_seconds=1.0)
        return self._known
