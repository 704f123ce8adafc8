"""One sample's tokens become its text: detokenizer, then stop strings, with the logprobs in step.

    token ids -> Detokenizer -> characters (-> ReasoningParser -> content) -> StopChecker -> text

A thought goes past the stop strings: they are looked for in what the answer says.
Tokens count as they are consumed, the one that completes a stop string included; later ones are
ignored. A token's logprob entry travels with the token's text: it waits while that text is held
back, and goes away with it when a stop string cuts it off. So the entries describe the text that
was sent, in a stream as in one piece: the thought and its tags included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from clients.text.detokenizer import Detokenizer
from clients.text.errors import TextLayerError
from clients.text.reasoning import ReasoningParser
from clients.text.stop_strings import StopChecker, StopResult
from clients.text.tokenizer import Tokenizer
from clients.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    token: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    token_id: int
    token: str
    bytes: bytes  # the token's true bytes, also where it is a piece of a character
    logprob: float
    rank: int  # 1 is the most likely
    top: tuple[TopLogprob, ...]  # most likely first
    hidden: bool  # adds nothing to the text: a special token or an end token


def logprob_entry(
    tokenizer: Tokenizer, token_id: int, logprobs: TokenLogprobs, *, hidden: bool
) -> LogprobEntry:
    return LogprobEntry(
        token_id=token_id,
        token=tokenizer.token_text(token_id),
        bytes=tokenizer.token_bytes(token_id),
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top=tuple(
            TopLogprob(top_id, tokenizer.token_text(top_id), tokenizer.token_bytes(top_id), logprob)
            for top_id, logprob in logprobs.top
        ),
        hidden=hidden,
    )


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    token_ids: tuple[int, ...]  # consumed by this push
    logprobs: tuple[LogprobEntry, ...]  # of the text released by now
    matched_stop: str | None
    thought: str = ""
    num_reasoning_tokens: int = 0  # more of the sample's tokens are known to be a thought's


class TextStream:
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        want_logprobs: bool = False,
        hidden_token_ids: Collection[int] = (),
        shown_token_ids: Collection[int] = (),
        reasoning: ReasoningParser | None = None,
    ) -> None:
        """`min_tokens`: a stop string counts from this token on: one that is complete with fewer
        tokens is ordinary text. `hidden_token_ids`: the ids that end the sample (end of sequence,
        stop ids); like special tokens they show only with `skip_special_tokens` off.
        `shown_token_ids`: special tokens that show all the same. `reasoning`: new, and owned from
        here on; None: all text is content."""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, shown_token_ids=shown_token_ids
        )
        self._stop_checker = StopChecker(stop, include_stop=include_stop_str_in_output)
        self._min_tokens = min_tokens
        self._want_logprobs = want_logprobs
        self._hidden_token_ids = frozenset(hidden_token_ids) if skip_special_tokens else frozenset()
        self._reasoning = reasoning
        self._thought: list[str] = []  # not yet delivered
        # Entries not yet delivered, each with the place in the text where its token begins.
        self._waiting: deque[tuple[int, LogprobEntry]] = deque()
        self._num_decoded = 0  # characters
        self._num_released = 0  # characters of the content, of those
        self.num_tokens = 0
        self.num_reasoning_tokens = 0  # of those; the tags are the thought's, too
        self.matched_stop: str | None = None

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> TextDelta:
        """`logprobs` holds one per token where they are wanted."""
        if self._want_logprobs and len(logprobs) != len(token_ids):
            raise TextLayerError(f"{len(token_ids)} tokens came with {len(logprobs)} logprobs")
        texts = []
        num_before, num_thought = self.num_tokens, self.num_reasoning_tokens
        for place, token_id in enumerate(token_ids):
            if self.matched_stop is not None:
                break
            self.num_tokens += 1
            if self._want_logprobs:
                entry = self._entry(token_id, logprobs[place])
                self._waiting.append((self._num_decoded, entry))
            if token_id not in self._hidden_token_ids:
                in_thought = self._in_thought
                texts.append(self._release(self._detokenizer.push(token_id)))
                if in_thought or self._in_thought:  # it comes first: all tokens so far are its own
                    self.num_reasoning_tokens = self.num_tokens
        return TextDelta(
            text="".join(texts),
            token_ids=tuple(token_ids[: self.num_tokens - num_before]),
            logprobs=self._released_entries(),
            matched_stop=self.matched_stop,
            thought=self._take_thought(),
            num_reasoning_tokens=self.num_reasoning_tokens - num_thought,
        )

    def finish(self) -> TextDelta:
        """No more tokens: the text that was held back, and U+FFFD for an unfinished character."""
        text = ""
        if self.matched_stop is None:
            text = self._release(self._detokenizer.finish())
        if self.matched_stop is None and self._reasoning is not None:
            split = self._reasoning.finish()
            self._thought.append(split.thought)
            text += self._check_stop(split.content)
        if self.matched_stop is None:
            rest = self._stop_checker.finish()
            self._num_released += len(rest)
            text += rest
        return TextDelta(
            text, (), self._released_entries(), self.matched_stop, self._take_thought()
        )

    @property
    def _in_thought(self) -> bool:
        return self._reasoning is not None and self._reasoning.in_thought

    def _release(self, text: str) -> str:
        self._num_decoded += len(text)
        if self._reasoning is not None and not self._reasoning.is_content:
            split = self._reasoning.push(text)
            self._thought.append(split.thought)
            text = split.content
        return self._check_stop(text)

    def _check_stop(self, text: str) -> str:
        result: StopResult = self._stop_checker.push(
            text, honour=self.num_tokens >= self._min_tokens
        )
        self._num_released += len(result.text)
        self.matched_stop = result.matched
        return result.text

    def _take_thought(self) -> str:
        if not self._thought:
            return ""
        thought, self._thought = "".join(self._thought), []
        return thought

    def _entry(self, token_id: int, logprobs: TokenLogprobs) -> LogprobEntry:
        hidden = token_id in self._hidden_token_ids or self._detokenizer.skips(token_id)
        return logprob_entry(self._tokenizer, token_id, logprobs, hidden=hidden)

    def _released_entries(self) -> tuple[LogprobEntry, ...]:
        if not self._waiting:
            return ()
        num_released = self._num_released
        if self._reasoning is not None:
            num_released += self._reasoning.num_passed
        nothing_held = num_released == self._num_decoded and not self._detokenizer.in_character
        released = []
        while self._waiting and (nothing_held or self._waiting[0][0] < num_released):
            released.append(self._waiting.popleft()[1])
        return tuple(released)
