"""A core without a model, as a process that `core_launcher` starts like the real one.

    python -m engine_service.scripted_core --fd N ...

Each step gives every running request the next token of a fixed text, and takes as long as a small
model's step, asleep: what the processes around it then spend is what streaming costs them. It
knows AddRequest (of one sample), AbortRequest and Shutdown.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time
from dataclasses import dataclass

from engine_service.messages import (
    AbortRequest,
    AddRequest,
    CoreStats,
    Finish,
    FinishReason,
    Ready,
    RequestOutput,
    RequestTiming,
    Shutdown,
    StepFrame,
)
from engine_service.transport import CoreChannel, SocketChannel

VOCAB_SIZE = 49_152
TOKEN_IDS = (338, 260, 5345, 282, 1048, 314, 260, 2240)  # words of the embedded model
_NUM_BLOCKS = 4096
_STEP_SECONDS = 0.015
_REQUEST_SECONDS = 0.001  # more, for each request in the step
_IDLE_SECONDS = 0.25  # between heartbeats

READY = Ready(
    pid=os.getpid(),
    architecture="scripted",
    vocab_size=VOCAB_SIZE,
    max_model_len=8192,
    eos_token_ids=(2,),
    num_blocks=_NUM_BLOCKS,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    device="cpu",
    dtype="float32",
    quantization="none",
    kv_cache_dtype="float32",
    batch_invariant=True,
    op_backends={},
    weights_digest="",
)


@dataclass(slots=True)
class _Running:
    request: AddRequest
    num_tokens: int = 0
    first_token_ns: int = 0


class ScriptedCore:
    def __init__(self, channel: CoreChannel) -> None:
        self._channel = channel
        self._running: dict[str, _Running] = {}
        self._num_steps = 0
        self._is_told_to_leave = False

    def run(self) -> None:
        """Until it is told to leave, or the service is gone."""
        self._channel.send(READY)
        mailbox = self._channel.mailbox
        while not (mailbox.closed or self._is_told_to_leave):
            if self._running:
                time.sleep(_STEP_SECONDS + _REQUEST_SECONDS * len(self._running))
            else:
                mailbox.wait(_IDLE_SECONDS)
            aborted = self._take_commands()
            self._step(aborted)

    def _take_commands(self) -> list[RequestOutput]:
        aborted: list[RequestOutput] = []
        for command in self._channel.mailbox.drain():
            match command:
                case AddRequest():
                    self._running[command.request_id] = _Running(command)
                case AbortRequest() if running := self._running.pop(command.request_id, None):
                    finish = _finish(running, FinishReason.ABORT, time.monotonic_ns())
                    aborted.append(RequestOutput(command.request_id, 0, finish=finish))
                case Shutdown():
                    self._is_told_to_leave = True
        return aborted

    def _step(self, outputs: list[RequestOutput]) -> None:
        """A heartbeat when nothing runs."""
        now_ns = time.monotonic_ns()
        num_tokens = len(self._running)
        outputs += [self._next_token(running, now_ns) for running in [*self._running.values()]]
        self._num_steps += 1
        stats = CoreStats(
            num_running=len(self._running), total_blocks=_NUM_BLOCKS, free_blocks=_NUM_BLOCKS
        )
        self._channel.send(StepFrame(self._num_steps, now_ns, now_ns, num_tokens, outputs, stats))

    def _next_token(self, running: _Running, now_ns: int) -> RequestOutput:
        request = running.request
        is_first = running.num_tokens == 0
        running.num_tokens += 1
        if is_first:
            running.first_token_ns = now_ns
        finish = None
        if running.num_tokens == request.stopping.max_tokens:
            finish = _finish(running, FinishReason.LENGTH, now_ns)
            del self._running[request.request_id]
        return RequestOutput(
            request.request_id,
            0,
            [TOKEN_IDS[running.num_tokens % len(TOKEN_IDS)]],
            num_prefilled_tokens=len(request.prompt_token_ids) if is_first else None,
            finish=finish,
        )


def _finish(running: _Running, reason: FinishReason, now_ns: int) -> Finish:
    timing = RequestTiming(
        running.request.arrival_ns,
        first_scheduled_ns=running.first_token_ns,
        first_token_ns=running.first_token_ns,
        finished_ns=now_ns,
    )
    return Finish(reason, timing)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine_service.scripted_core")
    parser.add_argument("--fd", type=int, required=True)
    arguments, _ = parser.parse_known_args()  # the others say how to load a model
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = SocketChannel(socket.socket(fileno=arguments.fd))
    ScriptedCore(channel).run()
    channel.close()


if __name__ == "__main__":
    main()
