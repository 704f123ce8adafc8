"""From the engine's events to what a choice says: the one place where an answer is made.

Streamed and whole answers are both built from these deltas, so they agree to the byte.

    event of one prompt's stream -> ChoiceDelta(s), each for choice = prompt * n + sample

A sample ends by the engine's Finished, or here, at the token that completes a stop string; the
engine may still be running it then (`take_stopped`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct

from clients.errors import EngineUnavailable
from clients.text.text_stream import LogprobEntry, TextDelta, TextStream
from clients.types import (
    Accepted,
    Delta,
    Finished,
    FinishReason,
    GenerateEvent,
    PrefillProgress,
    Timing,
)
from http_facade.prompt_logprobs import PromptLogprobs, PromptLogprobsCollector
from http_facade.tool_calls import CallDelta, SplitText, ToolCallStream

_SampleEvent = PrefillProgress | Delta | Finished


class ChoiceDelta(Struct, frozen=True):
    index: int
    text: str = ""  # without that of calls, and without the thought
    logprobs: tuple[LogprobEntry, ...] = ()
    token_ids: tuple[int, ...] = ()  # generated, consumed by this delta; hidden ones included
    begins: bool = False  # first delta of its choice
    prompt_logprobs: PromptLogprobs | None = None  # with the first delta, where asked for
    cached_tokens: int | None = None  # of the prompt, where this delta tells
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that matched
    calls: tuple[CallDelta, ...] = ()
    thought: str = ""
    num_reasoning_tokens: int = 0  # more of its tokens are known to be the thought's


@dataclass(slots=True)
class _Sample:
    text: TextStream
    calls: ToolCallStream | None  # None: all text is content
    has_begun: bool = False
    is_finished: bool = False

    def split(self, text: str, *, is_last: bool) -> SplitText:
        return self.calls.split(text, is_last=is_last) if self.calls else SplitText(text, ())

    def finish_reason(self, reason: str) -> str:
        return self.calls.finish_reason(reason) if self.calls else reason


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0  # of the completion's


class UsageCounter:
    """Adds up what the deltas of all prompts say, in the order in which they are sent."""

    def __init__(self, prompt_tokens: int, n: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._n = n
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        self._cached_tokens: dict[int, int] = {}  # by prompt

    def count(self, delta: ChoiceDelta) -> None:
        self._completion_tokens += len(delta.token_ids)
        self._reasoning_tokens += delta.num_reasoning_tokens
        if delta.cached_tokens is not None:
            prompt = delta.index // self._n
            self._cached_tokens[prompt] = max(
                delta.cached_tokens, self._cached_tokens.get(prompt, 0)
            )

    def usage(self) -> Usage:
        return Usage(
            self._prompt_tokens,
            self._completion_tokens,
            sum(self._cached_tokens.values()),
            self._reasoning_tokens,
        )


class PromptProcessor:
    """One prompt's n samples."""

    def __init__(
        self,
        first_choice: int,
        n: int,
        make_text_stream: Callable[[], TextStream],
        stop_token_ids: frozenset[int],
        *,
        make_call_stream: Callable[[], ToolCallStream | None] = lambda: None,
        prompt_logprobs: PromptLogprobsCollector | None = None,
        prompt_only: bool = False,
    ) -> None:
        """`prompt_only`: each sample ends when its prompt is computed, with no token of its own."""
        self._first_choice = first_choice
        self._samples = [_Sample(make_text_stream(), make_call_stream()) for _ in range(n)]
        self._num_running = n
        self._stop_token_ids = stop_token_ids
        self._stopped: list[int] = []
        self._prompt_logprobs = prompt_logprobs
        self._prompt_only = prompt_only
        self._held: list[_SampleEvent] = []  # until the prompt's logprobs are all here
        self.timings: list[Timing] = []  # of samples that told theirs with the first token
        self.relaxed: tuple[str, ...] = ()  # places in the constraint that the engine relaxed

    @property
    def is_finished(self) -> bool:
        return self._num_running == 0

    def take_stopped(self) -> list[int]:
        """Samples that ended here while the engine still runs them; each is told once."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def process(self, event: GenerateEvent) -> list[ChoiceDelta]:
        """Raises EngineUnavailable for a sample that the engine aborted by itself."""
        if isinstance(event, Accepted):
            self.relaxed = event.relaxed
            return []
        if self._prompt_logprobs is None:
            return self._process(event)
        held = self._hold(event, self._prompt_logprobs)
        return [delta for one in held for delta in self._process(one)]

    def _hold(self, event: _SampleEvent, collector: PromptLogprobsCollector) -> list[_SampleEvent]:
        """Choices begin with the prompt's logprobs, which come with sample 0: none begins before.

        Returns what may be processed now."""
        if isinstance(event, PrefillProgress):
            collector.add(event.prompt_logprobs)
        is_abort = isinstance(event, Finished) and event.reason is FinishReason.ABORT
        if is_abort or collector.is_complete:
            held, self._held = self._held, []
            return [*held, event]
        self._held.append(event)
        return []

    def _process(self, event: _SampleEvent) -> list[ChoiceDelta]:
        sample = self._samples[event.index]
        if sample.is_finished:
            return []
        match event:
            case Delta():
                return self._delta(event, sample)
            case PrefillProgress():
                return self._prefill(event, sample)
            case Finished():
                return self._finished(event, sample)

    def _prefill(self, event: PrefillProgress, sample: _Sample) -> list[ChoiceDelta]:
        begins, sample.has_begun = not sample.has_begun, True
        cached = event.cached_tokens if event.index == 0 else None
        deltas = []
        if begins or cached is not None:
            deltas.append(self._choice(event.index, begins=begins, cached_tokens=cached))
        if self._prompt_only and event.computed_tokens == event.prompt_tokens:
            self._stopped.append(event.index)
            deltas.append(self._finish(event.index, sample, "length", None))
        return deltas

    def _delta(self, event: Delta, sample: _Sample) -> list[ChoiceDelta]:
        if event.timing is not None:
            self.timings.append(event.timing)
        text = sample.text.push(event.token_ids, event.logprobs)
        deltas = [self._text(event.index, sample, text, is_last=text.matched_stop is not None)]
        if text.matched_stop is not None:
            self._stopped.append(event.index)
            deltas.append(self._finish(event.index, sample, "stop", text.matched_stop))
        return deltas

    def _finished(self, event: Finished, sample: _Sample) -> list[ChoiceDelta]:
        if event.reason is FinishReason.ABORT:
            raise EngineUnavailable("the engine gave the request up", reason="ENGINE_UNAVAILABLE")
        cached = event.usage.cached_tokens if event.index == 0 else None
        rest = sample.text.finish()
        last = self._text(event.index, sample, rest, cached, is_last=True)
        says = last.text or last.thought or last.calls or last.logprobs
        deltas = [last] if last.begins or says or cached is not None else []
        if rest.matched_stop is not None:
            return [*deltas, self._finish(event.index, sample, "stop", rest.matched_stop)]
        token_id = event.stop_token_id
        stop_reason = token_id if token_id in self._stop_token_ids else None
        return [*deltas, self._finish(event.index, sample, event.reason.value, stop_reason)]

    def _text(
        self,
        index: int,
        sample: _Sample,
        text: TextDelta,
        cached_tokens: int | None = None,
        *,
        is_last: bool,
    ) -> ChoiceDelta:
        begins, sample.has_begun = not sample.has_begun, True
        split = sample.split(text.text, is_last=is_last)
        return self._choice(
            index,
            text=split.content,
            thought=text.thought,
            num_reasoning_tokens=text.num_reasoning_tokens,
            calls=split.calls,
            logprobs=text.logprobs,
            token_ids=text.token_ids,
            begins=begins,
            cached_tokens=cached_tokens,
        )

    def _finish(
        self, index: int, sample: _Sample, reason: str, stop_reason: str | int | None
    ) -> ChoiceDelta:
        sample.is_finished = True
        self._num_running -= 1
        return self._choice(
            index, finish_reason=sample.finish_reason(reason), stop_reason=stop_reason
        )

    def _choice(
        self,
        index: int,
        *,
        text: str = "",
        thought: str = "",
        num_reasoning_tokens: int = 0,
        calls: tuple[CallDelta, ...] = (),
        logprobs: tuple[LogprobEntry, ...] = (),
        token_ids: tuple[int, ...] = (),
        begins: bool = False,
        cached_tokens: int | None = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> ChoiceDelta:
        return ChoiceDelta(
            index=self._first_choice + index,
            text=text,
            thought=thought,
            num_reasoning_tokens=num_reasoning_tokens,
            calls=calls,
            logprobs=logprobs,
            token_ids=token_ids,
            begins=begins,
            prompt_logprobs=(
                self._prompt_logprobs.result() if begins and self._prompt_logprobs else None
            ),
            cached_tokens=cached_tokens,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
