"""P1, the engine core's process: loads the model, answers Ready, steps until told to leave.

    python -m engine_service.core_process --fd N --config JSON

Started by the engine service only, with one end of a socket pair as file descriptor N. It ends
by Shutdown, by the service's end (hang-up, and SIGKILL from the kernel), or by SIGKILL; it
ignores SIGINT and SIGTERM, which may reach a whole process group while the service drains.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from engine_service.config import CoreConfig
from engine_service.cpu_policy import compute_as_usual
from engine_service.logs import configure_logging
from engine_service.messages import Ready, StartFailed
from engine_service.model_error import ModelError
from engine_service.transport import CoreChannel, SocketChannel

if TYPE_CHECKING:
    from engine_service.engine_core import EngineCore

_PR_SET_PDEATHSIG: Final = 1

EXIT_BAD_CONFIGURATION: Final = 2

logger = logging.getLogger(__name__)


def build_core(config: CoreConfig, channel: CoreChannel) -> tuple[EngineCore, Ready]:
    """Loads the model and allocates the KV pool. Raises ModelError for what can't be served."""
    # Here, not above: they load torch, and the hang-up must be noticed from the first moment.
    from engine_service.compute_device import pick_device, sized_for
    from engine_service.engine_core import EngineCore
    from engine_service.model_runner import ModelRunner
    from engine_service.structured_output import StructuredOutputManager

    device = pick_device(config.model.device)
    config = sized_for(config, device)
    runner = ModelRunner(config, device)
    grammars = StructuredOutputManager(
        config.model.model_dir,
        vocab_size=runner.vocab_size,
        eos_token_ids=runner.eos_token_ids,
        on_ready=channel.mailbox.wake,
        config=config.grammar,
    )
    ready = Ready(
        pid=os.getpid(),
        architecture=runner.architecture,
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        eos_token_ids=tuple(runner.eos_token_ids),
        num_blocks=runner.num_blocks,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        device=runner.device_name,
        dtype=runner.dtype_name,
        quantization=runner.quantization,
        kv_cache_dtype=runner.kv_cache_dtype_name,
        batch_invariant=runner.batch_invariant,
        op_backends=runner.op_backends,
        weights_digest=runner.weights_digest,
    )
    return EngineCore(config, channel, runner, grammars), ready


def serve_core(
    config: CoreConfig, channel: CoreChannel, on_loaded: Callable[[Ready], None] = lambda _: None
) -> int:
    """The life of a core, in a process or a thread; returns the exit code."""
    try:
        core, ready = build_core(config, channel)
    except ModelError as error:
        channel.send(StartFailed(str(error)))
        return EXIT_BAD_CONFIGURATION
    except Exception:
        logger.exception("the engine core could not start")
        return 1
    on_loaded(ready)
    channel.send(ready)
    try:
        core.run()
    except Exception:
        logger.exception("the engine core ends")
        return 1
    return 0


def _prepare_for_steps(ready: Ready) -> None:
    """Of a process that is a core's own.

    Looking for garbage among what loading makes costs a tenth of a start and finds none: it
    stays. Nor does any later collection look at it, which would stop a step for that long.

    Where the compiled kernels compute, torch has only small work left. A thread that it woke for
    that would spin for milliseconds afterwards, in place of the kernels' own.
    """
    import torch  # as above

    gc.freeze()
    gc.enable()
    if set(ready.op_backends.values()) == {"cpu"}:
        torch.set_num_threads(1)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_service.core_process")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--log-level", default="info")
    arguments = parser.parse_args()

    gc.disable()
    _die_with_parent()
    compute_as_usual()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging(arguments.log_level)
    config = msgspec.json.decode(arguments.config, type=CoreConfig)
    channel = SocketChannel(socket.socket(fileno=arguments.fd))
    exit_code = serve_core(config, channel, on_loaded=_prepare_for_steps)
    channel.close()
    return exit_code


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a grammar that still compiles must not hold the process
