"""Events to deltas, deltas to answers: what a stream says adds up to the whole answer."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from clients.errors import EngineUnavailable
from clients.text.text_stream import LogprobEntry, TextStream, TopLogprob
from clients.text.tokenizer import Tokenizer
from clients.types import (
    Accepted,
    Delta,
    Finished,
    FinishReason,
    GenerateEvent,
    PrefillProgress,
    Timing,
    TokenLogprobs,
    Usage,
)
from http_facade.answers import (
    AnswerHead,
    AnswerOptions,
    WholeChoice,
    finite_logprob,
    usage_body,
)
from http_facade.chat_answers import ChatFormat
from http_facade.completion_answers import CompletionFormat
from http_facade.output_processor import ChoiceDelta, PromptProcessor, UsageCounter
from http_facade.prompt_logprobs import PromptLogprobsCollector
from http_facade.prompts import Prompt

HEAD = AnswerHead("cmpl-1", 1, "m", "fp_1")
TIMING = Timing(0, 0, 0, 0, 0, 1, 0, 0, 1)
PROMPT = Prompt((1, 2))
LOGPROBS = AnswerOptions(want_logprobs=True)


@pytest.fixture(scope="module")
def tok(embedded_model_dir: Path) -> Tokenizer:
    names = ("tokenizer.json", "tokenizer_config.json")
    return Tokenizer.from_files({name: (embedded_model_dir / name).read_bytes() for name in names})


def processor(
    tok: Tokenizer, *, n: int = 1, stop: tuple[str, ...] = (), stop_token_ids: tuple[int, ...] = ()
) -> PromptProcessor:
    def make_text_stream() -> TextStream:
        return TextStream(tok, stop=stop, hidden_token_ids={2, *stop_token_ids})

    return PromptProcessor(0, n, make_text_stream, frozenset(stop_token_ids))


def finished(
    index: int = 0, reason: FinishReason = FinishReason.STOP, stop_token_id: int | None = None
) -> Finished:
    return Finished(index, reason, Usage(5, 3, 0), TIMING, stop_token_id)


def play(source: PromptProcessor, *events: GenerateEvent) -> list[ChoiceDelta]:
    return [delta for event in events for delta in source.process(event)]


def test_a_choice_begins_once_says_its_text_and_finishes_once(tok: Tokenizer) -> None:
    ids = tuple(tok.encode("Hello there"))
    deltas = play(
        processor(tok),
        Accepted("r", 5, 9),
        PrefillProgress(0, 5, 2, 3),
        PrefillProgress(0, 5, 5, 3),
        Delta(0, ids),
        Delta(0, (2,)),
        finished(stop_token_id=2),
    )
    assert [delta.begins for delta in deltas].count(True) == 1 and deltas[0].begins
    assert "".join(delta.text for delta in deltas) == "Hello there"
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["stop"]
    assert deltas[-1].finish_reason == "stop" and deltas[-1].stop_reason is None
    assert sum(len(delta.token_ids) for delta in deltas) == len(ids) + 1


def test_a_choice_without_progress_or_text_still_begins(tok: Tokenizer) -> None:
    deltas = play(processor(tok), Accepted("r", 5, 9), finished(reason=FinishReason.LENGTH))
    assert [delta.begins for delta in deltas] == [True, False]
    assert deltas[-1].finish_reason == "length"


def test_only_stop_ids_that_were_asked_for_are_stop_reasons(tok: Tokenizer) -> None:
    asked = processor(tok, stop_token_ids=(7,))
    assert play(asked, Delta(0, (7,)), finished(stop_token_id=7))[-1].stop_reason == 7
    other = processor(tok, stop_token_ids=(7,))
    assert play(other, Delta(0, (2,)), finished(stop_token_id=2))[-1].stop_reason is None


def test_a_stop_string_ends_its_sample_and_tells_once_that_the_engine_runs_on(
    tok: Tokenizer,
) -> None:
    source = processor(tok, n=2, stop=("there",))
    ids = tuple(tok.encode("Hello there you"))
    deltas = play(source, Delta(1, ids))
    assert "".join(delta.text for delta in deltas) == "Hello "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "there")
    assert len(deltas[0].token_ids) == len(tok.encode("Hello there"))
    assert source.take_stopped() == [1] and source.take_stopped() == []
    assert not source.is_finished
    # what the engine says of it until the abort arrives is no longer heard
    assert play(source, Delta(1, ids), finished(1, FinishReason.ABORT)) == []
    play(source, Delta(0, ids[:1]), finished(0))
    assert source.is_finished


def test_an_abort_that_nobody_asked_for_is_an_error(tok: Tokenizer) -> None:
    with pytest.raises(EngineUnavailable):
        play(processor(tok), Delta(0, (28,)), finished(reason=FinishReason.ABORT))


def test_usage_adds_up_prompts_and_counts_the_prompts_cache_hits_once() -> None:
    counter = UsageCounter(prompt_tokens=12, n=2)
    for delta in (
        ChoiceDelta(0, cached_tokens=3),
        ChoiceDelta(0, "a", token_ids=(1, 2), cached_tokens=4),
        ChoiceDelta(1, "b", token_ids=(1,)),
        ChoiceDelta(2, "c", token_ids=(1, 2, 3, 4, 5), cached_tokens=1),
    ):
        counter.count(delta)
    body = usage_body(counter.usage())
    assert (body.prompt_tokens, body.completion_tokens, body.total_tokens) == (12, 8, 20)
    assert body.prompt_tokens_details.cached_tokens == 5
    assert body.completion_tokens_details.reasoning_tokens == 0


def entry(
    text: str | bytes, logprob: float = -1.0, hidden: bool = False, top: tuple[str, ...] = ()
) -> LogprobEntry:
    raw = text if isinstance(text, bytes) else text.encode()
    alternatives = tuple(TopLogprob(0, t, t.encode(), -0.5 - i) for i, t in enumerate(top))
    return LogprobEntry(0, raw.decode(errors="replace"), raw, logprob, 1, alternatives, hidden)


def completion_format() -> CompletionFormat:
    return CompletionFormat(HEAD, n=1, prompts=[PROMPT], options=LOGPROBS)


def test_offsets_are_the_same_in_a_stream_and_count_characters() -> None:
    smile = "é🌶"
    raw = smile.encode()
    entries = [entry("ab"), entry(raw[:3]), entry(raw[3:5]), entry(raw[5:]), entry("c")]
    entries.append(entry("<eos>", hidden=True))
    whole = completion_format().whole(
        [WholeChoice(0, ["ab", smile, "c"], entries, "stop")],
        usage_body(UsageCounter(1, 1).usage()),
    )
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset == [0, 2, 3, 3, 4, 5]

    streamed = completion_format()
    offsets: list[int] = []
    for one in entries:
        for chunk in streamed.chunks(ChoiceDelta(0, "x", (one,)), None):
            assert chunk.choices[0].logprobs is not None
            offsets += chunk.choices[0].logprobs.text_offset
    assert offsets == logprobs.text_offset


def test_the_chosen_token_is_reported_even_outside_the_top() -> None:
    answer = completion_format().whole(
        [WholeChoice(0, ["z"], [entry("z", -9.0, top=("a", "b")), entry("a", -0.5)], "stop")],
        usage_body(UsageCounter(1, 1).usage()),
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs == [{"a": -0.5, "b": -1.5, "z": -9.0}, {"a": -0.5}]


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf")])
def test_logprobs_are_finite_json(value: float) -> None:
    assert finite_logprob(value) == -9999.0
    chat = ChatFormat(HEAD, prompt=PROMPT, options=LOGPROBS)
    (chunk,) = chat.chunks(ChoiceDelta(0, "a", (entry("a", value),)), None)
    assert b"-9999.0" in msgspec.json.encode(chunk)
    assert finite_logprob(1e-7) == 0.0


def test_logprobs_come_with_their_text(tok: Tokenizer) -> None:
    source = PromptProcessor(0, 1, lambda: TextStream(tok, want_logprobs=True), frozenset())
    ids = tuple(tok.encode("🌶"))
    assert len(ids) > 1
    pieces = [Delta(0, (i,), (TokenLogprobs(-1.0, 1, ((i, -1.0),)),)) for i in ids]
    deltas = play(source, *pieces, finished())
    entries = [one for delta in deltas for one in delta.logprobs]
    assert b"".join(one.bytes for one in entries) == "🌶".encode()


# ---------------------------------------------------------------- the prompt's own tokens

PROMPT_IDS = (504, 2281, 18)


def told(*logprobs: float) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(one, 2, ((7, -0.1),)) for one in logprobs)


def scoring(tok: Tokenizer, *, n: int = 1, prompt_only: bool = False) -> PromptProcessor:
    collector = PromptLogprobsCollector(PROMPT_IDS, tok, ())
    return PromptProcessor(
        0,
        n,
        lambda: TextStream(tok),
        frozenset(),
        prompt_logprobs=collector,
        prompt_only=prompt_only,
    )


def test_no_choice_begins_before_the_prompts_logprobs_are_here(tok: Tokenizer) -> None:
    source = scoring(tok, n=2)
    early = play(
        source,
        PrefillProgress(1, 3, 3, 0),
        Delta(1, (28,)),
        PrefillProgress(0, 3, 1, 0, told(-1.5)),
    )
    assert early == []
    deltas = play(source, PrefillProgress(0, 3, 3, 0, told(-2.5)), Delta(0, (29,)))
    begins = [delta for delta in deltas if delta.begins]
    assert sorted(delta.index for delta in begins) == [0, 1]
    for delta in begins:
        assert delta.prompt_logprobs is not None
        assert delta.prompt_logprobs.first.token == tok.token_text(PROMPT_IDS[0])
        assert [entry.logprob for entry in delta.prompt_logprobs.rest] == [-1.5, -2.5]
        assert [entry.token_id for entry in delta.prompt_logprobs.rest] == list(PROMPT_IDS[1:])
    assert [d.token_ids for d in deltas if d.token_ids] == [(28,), (29,)]


def test_an_abort_is_told_though_logprobs_are_missing(tok: Tokenizer) -> None:
    with pytest.raises(EngineUnavailable):
        play(scoring(tok), finished(reason=FinishReason.ABORT))


def test_a_prompt_alone_ends_when_it_is_computed(tok: Tokenizer) -> None:
    source = scoring(tok, prompt_only=True)
    assert play(source, PrefillProgress(0, 3, 2, 0, told(-1.0))) == []
    deltas = play(source, PrefillProgress(0, 3, 3, 0, told(-2.0)), Delta(0, (28,)))
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert [delta.begins for delta in deltas].count(True) == 1
    assert not any(delta.token_ids or delta.text for delta in deltas)
    assert source.is_finished


def test_an_echoed_prompt_opens_the_logprobs(tok: Tokenizer) -> None:
    source = scoring(tok)
    deltas = play(source, PrefillProgress(0, 3, 3, 0, told(-1.0, float("-inf"))), finished())
    options = AnswerOptions(want_logprobs=True, num_echo_logprobs=0, num_prompt_logprobs=1)
    echoed = Prompt(PROMPT_IDS, tok.decode(PROMPT_IDS))
    whole = WholeChoice(0)
    for delta in deltas:
        whole.add(delta)
    answer = CompletionFormat(HEAD, n=1, prompts=[echoed], options=options).whole(
        [whole], usage_body(UsageCounter(3, 1).usage())
    )
    (choice,) = answer.choices
    assert choice.text == echoed.text
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [None, -1.0, -9999.0]
    tokens = [tok.token_text(token_id) for token_id in PROMPT_IDS]
    assert choice.logprobs.tokens == tokens
    assert choice.logprobs.top_logprobs == [None, {tokens[1]: -1.0}, {tokens[2]: -9999.0}]
    assert choice.logprobs.text_offset == [0, len(tokens[0]), len(tokens[0] + tokens[1])]
    body = msgspec.to_builtins(choice.prompt_logprobs)
    assert body[0] is None
    assert body[1][7] == {"logprob": -0.1, "rank": 1, "decoded_token": tok.token_text(7)}
    assert body[1][PROMPT_IDS[1]]["rank"] == 2
