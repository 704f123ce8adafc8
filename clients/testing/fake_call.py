"""One Generate call at a FakeEngine: what it asked, what it was played, how it ended."""

from __future__ import annotations

import asyncio
import enum
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing

from clients.testing import encoding
from clients.testing.script import (
    Accept,
    Emit,
    Fail,
    Finish,
    Hang,
    Pause,
    Progress,
    Script,
    WaitFor,
)
from clients.types import FinishReason, GenerateRequest, ModelInfo, Timing, TokenLogprobs, Usage
from protos import engine_pb2


class Outcome(enum.Enum):
    OPEN = "open"
    FINISHED = "finished"
    FAILED = "failed"  # by the script
    CANCELLED = "cancelled"  # by the client, its deadline, or the fake's own death


class FakeCall:
    """Part of the record that tests read: request, metadata, timeout and outcome."""

    def __init__(
        self,
        request: GenerateRequest,
        *,
        metadata: Mapping[str, str],
        timeout_seconds: float | None,
        model_info: ModelInfo,
    ) -> None:
        self.request = request
        self.metadata = metadata
        self.timeout_seconds = timeout_seconds  # left when the call arrived; None: no deadline
        self.outcome = Outcome.OPEN
        self._closed = asyncio.Event()
        self._abort_requested = asyncio.Event()
        self._aborting: set[int] = set()
        self._unfinished = set(range(1 if request.sampling.n is None else request.sampling.n))
        self._progress: dict[int, Progress] = {}
        self._num_emitted: dict[int, int] = defaultdict(int)
        self._start_seconds = time.monotonic()
        self._first_token_seconds: dict[int, float] = {}
        self._model_info = model_info
        self._num_prompt_tokens = _prompt_length(request)
        self._num_told = 1  # prompt tokens whose logprobs are out; the first has none
        self._seq = 0

    async def wait_closed(self, timeout: float = 10.0) -> Outcome:
        """How it ended; TimeoutError if it is still open by then."""
        await asyncio.wait_for(self._closed.wait(), timeout)
        return self.outcome

    def close(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._closed.set()

    def abort(self, indices: Sequence[int]) -> None:
        """As the engine does: each sample ends with Finished{ABORT}, at once."""
        self._aborting |= self._unfinished & set(indices or self._unfinished)
        self._abort_requested.set()

    async def play(self, script: Script) -> AsyncGenerator[engine_pb2.GenerateEvent, None]:
        """Raises the error of a Fail step."""
        for step in script.steps:
            match step:
                case Fail():
                    raise ScriptedFailure(step)
                case Pause():
                    idle = self._idle(asyncio.sleep(step.seconds))
                case WaitFor():
                    idle = self._idle(step.event.wait())
                case Hang():
                    idle = self._idle(asyncio.Event().wait())
                case _:
                    for event in self._events(step):
                        yield event
                    continue
            async with aclosing(idle) as events:
                async for event in events:
                    yield event
            if not self._unfinished:
                return

    async def _idle(
        self, waited_for: Awaitable[object]
    ) -> AsyncGenerator[engine_pb2.GenerateEvent, None]:
        """Waits, and ends samples that are aborted meanwhile."""
        waiting = asyncio.ensure_future(waited_for)
        aborted = asyncio.ensure_future(self._abort_requested.wait())
        try:
            while not waiting.done() and self._unfinished:
                await asyncio.wait((waiting, aborted), return_when=asyncio.FIRST_COMPLETED)
                if aborted.done():
                    for event in self._abort_events():
                        yield event
                    aborted = asyncio.ensure_future(self._abort_requested.wait())
        finally:
            waiting.cancel()
            aborted.cancel()

    def _events(
        self, step: Accept | Progress | Emit | Finish
    ) -> Iterator[engine_pb2.GenerateEvent]:
        yield from self._abort_events()
        if isinstance(step, Accept):
            yield self._accepted(step)
        elif step.index in self._unfinished:
            match step:
                case Progress():
                    yield self._prefill_progress(step)
                case Emit():
                    yield self._delta(step)
                case Finish():
                    yield self._finished(step)

    def _abort_events(self) -> Iterator[engine_pb2.GenerateEvent]:
        self._abort_requested.clear()
        while self._aborting:
            yield self._finished(Finish(FinishReason.ABORT, min(self._aborting)))

    # ------------------------------------------------------------ events

    def _event(self, index: int) -> engine_pb2.GenerateEvent:
        event = engine_pb2.GenerateEvent(seq=self._seq, index=index)
        self._seq += 1
        return event

    def _accepted(self, step: Accept) -> engine_pb2.GenerateEvent:
        if step.prompt_tokens is not None:
            self._num_prompt_tokens = step.prompt_tokens
        max_tokens = step.max_tokens
        if max_tokens is None:
            left = max(0, self._model_info.max_model_len - self._num_prompt_tokens)
            asked = self.request.stopping.max_tokens
            max_tokens = left if asked is None else min(asked, left)
        event = self._event(0)
        event.accepted.request_id = self.request.request_id
        event.accepted.prompt_tokens = self._num_prompt_tokens
        event.accepted.max_tokens = max_tokens
        event.accepted.relaxed.extend(step.relaxed)
        return event

    def _prefill_progress(self, step: Progress) -> engine_pb2.GenerateEvent:
        self._progress[step.index] = step
        computed_tokens = step.computed_tokens
        if computed_tokens is None:
            computed_tokens = self._num_prompt_tokens
        event = self._event(step.index)
        progress = event.prefill_progress
        progress.prompt_tokens = self._num_prompt_tokens
        progress.computed_tokens = computed_tokens
        progress.cached_tokens = step.cached_tokens
        if step.index == 0:
            progress.prompt_logprobs.extend(self._prompt_logprobs(computed_tokens))
        return event

    def _prompt_logprobs(self, num_computed: int) -> list[engine_pb2.TokenLogprobs]:
        """Made up, of the prompt tokens after the first that were not told of yet."""
        num_alternatives = self.request.num_prompt_logprobs
        if num_alternatives is None or isinstance(self.request.prompt, str):
            return []
        known = min(num_computed + 1, self._num_prompt_tokens)  # a token tells of the next one
        told, self._num_told = self._num_told, max(known, self._num_told)
        return [
            encoding.logprobs_to_proto(self._made_up_logprobs(token_id, num_alternatives))
            for token_id in self.request.prompt[told : self._num_told]
        ]

    def _delta(self, step: Emit) -> engine_pb2.GenerateEvent:
        is_first = step.index not in self._first_token_seconds
        self._first_token_seconds.setdefault(step.index, self._age_seconds())
        self._num_emitted[step.index] += len(step.token_ids)
        logprobs: Sequence[TokenLogprobs] = ()
        if self.request.num_logprobs is not None:
            logprobs = step.logprobs or [
                self._made_up_logprobs(token_id, self.request.num_logprobs)
                for token_id in step.token_ids
            ]
        event = self._event(step.index)
        event.delta.CopyFrom(encoding.delta_to_proto(step.token_ids, logprobs))
        if is_first and self.request.tells_timing:
            event.delta.timing.CopyFrom(encoding.timing_to_proto(self._timing(step.index)))
        return event

    def _finished(self, step: Finish) -> engine_pb2.GenerateEvent:
        self._unfinished.discard(step.index)
        self._aborting.discard(step.index)
        event = self._event(step.index)
        event.finished.CopyFrom(
            encoding.finished_to_proto(
                step.reason,
                step.stop_token_id,
                step.usage or self._usage(step.index),
                step.timing or self._timing(step.index),
            )
        )
        return event

    def _usage(self, index: int) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=self._num_cached_tokens(index),
            completion_tokens=self._num_emitted[index],
        )

    def _timing(self, index: int) -> Timing:
        age_seconds = self._age_seconds()
        first_token_seconds = self._first_token_seconds.get(index, age_seconds)
        return Timing(
            queue_seconds=0.0,
            grammar_wait_seconds=0.0,
            prefill_seconds=first_token_seconds,
            first_token_seconds=first_token_seconds,
            decode_seconds=age_seconds - first_token_seconds,
            prefill_chunks=1,
            cached_tokens=self._num_cached_tokens(index),
            preemptions=0,
            first_step_id=1,
        )

    def _made_up_logprobs(self, token_id: int, num_alternatives: int) -> TokenLogprobs:
        """The chosen token is the likeliest; its successors follow. They sum to below one."""
        vocab_size = self._model_info.vocab_size
        top = tuple(
            ((token_id + rank) % vocab_size, -0.5 - rank)
            for rank in range(min(num_alternatives, vocab_size))
        )
        return TokenLogprobs(logprob=-0.5, rank=1, top=top)

    def _num_cached_tokens(self, index: int) -> int:
        return self._progress[index].cached_tokens if index in self._progress else 0

    def _age_seconds(self) -> float:
        return time.monotonic() - self._start_seconds


class ScriptedFailure(Exception):
    def __init__(self, step: Fail) -> None:
        super().__init__(step.error.message)
        self.step = step


def _prompt_length(request: GenerateRequest) -> int:
    return len(request.prompt.split() if isinstance(request.prompt, str) else request.prompt)
