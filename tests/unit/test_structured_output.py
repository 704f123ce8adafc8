"""Grammars from submission to release, on the embedded model's tokenizer and real xgrammar."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from engine_service import structured_output
from engine_service.config import GrammarConfig
from engine_service.errors import InternalError, InvalidRequest
from engine_service.messages import Failure, SamplingParams, StoppingCriteria, StructuredOutput
from engine_service.request import Request, RequestKey
from engine_service.sampler import plan_sampling
from engine_service.structured_output import StructuredOutputManager
from kernels.sampling_ops import reference_sampling_ops

VOCAB = 49152
PADDED = VOCAB + 40  # a vocabulary padded beyond its tokenizer, no multiple of 32
EOS = 2
OBJECT = StructuredOutput("json_object")
KEY: RequestKey = ("r", 0)


class Wakeup:
    """What an idle core would sleep on."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def __call__(self) -> None:
        self._event.set()

    def wait(self) -> None:
        assert self._event.wait(60), "nobody woke the core"
        self._event.clear()


@pytest.fixture(scope="module")
def wakeup() -> Wakeup:
    return Wakeup()


@contextmanager
def new_manager(
    model_dir: Path, wakeup: Wakeup, vocab_size: int = VOCAB, eos: tuple[int, ...] = (EOS,)
) -> Iterator[StructuredOutputManager]:
    manager = StructuredOutputManager(model_dir, vocab_size, eos, wakeup, GrammarConfig())
    yield manager
    manager.close()


@pytest.fixture(scope="module")
def shared(embedded_model_dir: Path, wakeup: Wakeup) -> Iterator[StructuredOutputManager]:
    with new_manager(embedded_model_dir, wakeup, PADDED) as manager:
        yield manager


@pytest.fixture
def manager(shared: StructuredOutputManager) -> Iterator[StructuredOutputManager]:
    yield shared
    shared.release(KEY)


@pytest.fixture(scope="module")
def tokenizer(embedded_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(embedded_model_dir / "tokenizer.json"))


def schema(value: object) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(value))


def choice(*values: str) -> StructuredOutput:
    return StructuredOutput("choice", json.dumps(values))


TAG = StructuredOutput(
    "structural_tag",
    json.dumps(
        {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<call>"],
                "tags": [
                    {
                        "type": "tag",
                        "begin": "<call>",
                        "content": {
                            "type": "json_schema",
                            "json_schema": {"properties": {"a": {"type": "integer"}}},
                        },
                        "end": "</call>",
                    }
                ],
            },
        }
    ),
)


def request(key: RequestKey = KEY) -> Request:
    return Request(key[0], key[1], [1], SamplingParams(), StoppingCriteria(max_tokens=9))


def ready(
    manager: StructuredOutputManager, wakeup: Wakeup, spec: StructuredOutput, key: RequestKey = KEY
) -> Failure | None:
    """Submits and waits as an idle core does."""
    manager.submit(key, spec)
    while True:
        for polled, failure in manager.poll():
            if polled == key:
                return failure
        wakeup.wait()


def allowed(manager: StructuredOutputManager, key: RequestKey = KEY) -> set[int]:
    mask = manager.fill_bitmask([request(key)])
    assert mask is not None
    assert mask.rows == [0]
    bits = mask.words_GW[0].unsqueeze(-1) >> torch.arange(32) & 1
    return set(bits.flatten()[:PADDED].nonzero().flatten().tolist())


def accepts(manager: StructuredOutputManager, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text, then the end, is allowed token by token."""
    for token_id in [*tokenizer.encode(text, add_special_tokens=False).ids, EOS]:
        if token_id not in allowed(manager):
            return False
        manager.accept(KEY, token_id)
    return manager.is_terminated(KEY)


@pytest.mark.parametrize(
    ("spec", "text", "right"),
    [
        (OBJECT, '{"a": [1, true, {"b": null}], "c": "x"}', True),
        (OBJECT, "{}", True),
        (OBJECT, "[1]", False),
        (OBJECT, '"text"', False),
        (OBJECT, '{"a":  1}', False),
        (OBJECT, '{"a": 1}\n', False),
        (OBJECT, '\n{"a": 1}', False),
        (schema({}), "[1, 2]", True),
        (schema({}), "3", True),
        (schema({"type": "object", "properties": {"a": {"type": "integer"}}}), '{"a": 7}', True),
        (schema({"type": "object", "properties": {"a": {"type": "integer"}}}), '{"b": 7}', False),
        (schema({"type": "object", "properties": {"a": {"type": "integer"}}}), '{"a": "7"}', False),
        (schema({"type": "array", "items": {"type": "boolean"}}), "[true, false]", True),
        (schema({"type": "array", "items": {"type": "boolean"}}), "[true,   false]", False),
        (schema({"type": "string", "pattern": "([a-c]*)*d"}), '"abcad"', True),
        (schema({"enum": ["🌶️ ďábel 漢字"]}), '"🌶️ ďábel 漢字"', True),
        (StructuredOutput("regex", "^[a-c]+-[0-9]{2}$"), "abba-07", True),
        (StructuredOutput("regex", "[a-c]+-[0-9]{2}"), "abba-07", True),
        (StructuredOutput("regex", "[a-c]+-[0-9]{2}"), "x abba-07", False),
        (StructuredOutput("regex", "[a-c]+-[0-9]{2}"), "abba-071", False),
        (StructuredOutput("grammar", 'root ::= "a" x\nx ::= [0-9]+ | "(" root ")"'), "a(a7)", True),
        (StructuredOutput("grammar", 'root ::= "a" x\nx ::= [0-9]+ | "(" root ")"'), "a(a7", False),
        (choice("a", 'b"]\\', "line\nbreak", "🌶️ď"), 'b"]\\', True),
        (choice("a", 'b"]\\', "line\nbreak", "🌶️ď"), "line\nbreak", True),
        (choice("a", 'b"]\\', "line\nbreak", "🌶️ď"), "🌶️ď", True),
        (choice("a", "ab"), "ab", True),
        (choice("a", "ab"), "a", True),
        (choice("a", "ab"), "b", False),
        (choice("[a-z]"), "c", False),
        (TAG, 'Sure. <call>{"a": 7}</call> Done.', True),
        (TAG, "No call at all.", True),
        (TAG, '<call>{"a": 7}', False),
        (TAG, '<call>{"a":7}</call>', False),
        (TAG, '<call>{"a": "7"}</call>', False),
        (TAG, '<call> {"a": 7}</call>', False),
    ],
)
def test_what_a_grammar_takes(
    manager: StructuredOutputManager,
    wakeup: Wakeup,
    tokenizer: Tokenizer,
    spec: StructuredOutput,
    text: str,
    right: bool,
) -> None:
    assert ready(manager, wakeup, spec) is None
    assert accepts(manager, tokenizer, text) is right


def test_the_end_is_allowed_exactly_when_complete(
    manager: StructuredOutputManager, wakeup: Wakeup, tokenizer: Tokenizer
) -> None:
    assert ready(manager, wakeup, schema({"enum": ["yes"]})) is None
    for token_id in tokenizer.encode('"yes"', add_special_tokens=False).ids:
        assert EOS not in allowed(manager)
        manager.accept(KEY, token_id)
    assert allowed(manager) == {EOS}
    assert not manager.is_terminated(KEY)
    manager.accept(KEY, EOS)
    assert manager.is_terminated(KEY)


def test_markers_and_padding_are_never_allowed(
    manager: StructuredOutputManager, wakeup: Wakeup, tokenizer: Tokenizer
) -> None:
    assert ready(manager, wakeup, schema({"type": "string"})) is None
    (quote,) = tokenizer.encode('"', add_special_tokens=False).ids
    manager.accept(KEY, quote)
    inside = allowed(manager)
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert len(special) > 5
    assert not inside & special
    assert max(inside) < VOCAB
    assert len(inside) > VOCAB * 0.8


def test_a_token_that_breaks_the_grammar_is_a_typed_error(
    manager: StructuredOutputManager, wakeup: Wakeup, tokenizer: Tokenizer
) -> None:
    assert ready(manager, wakeup, OBJECT) is None
    (letter,) = tokenizer.encode("x", add_special_tokens=False).ids
    with pytest.raises(InternalError):
        manager.accept(KEY, letter)


def test_a_token_without_an_alternative_is_taken(
    manager: StructuredOutputManager, wakeup: Wakeup, tokenizer: Tokenizer
) -> None:
    assert ready(manager, wakeup, choice("yes", "no")) is None
    assert manager.take_forced_token(KEY) is None
    (yes,) = tokenizer.encode("yes", add_special_tokens=False).ids
    manager.accept(KEY, yes)
    assert allowed(manager) == {EOS}
    assert manager.take_forced_token(KEY) == EOS
    assert manager.is_terminated(KEY)
    assert manager.take_forced_token(KEY) is None


def test_what_gets_too_slow_to_follow_ends_its_request_in_time(
    manager: StructuredOutputManager, wakeup: Wakeup, tokenizer: Tokenizer
) -> None:
    """It compiles at once, and takes a little longer with each token."""
    ambiguous = StructuredOutput("grammar", 'root ::= (("a"*)*)* "b"')
    assert ready(manager, wakeup, ambiguous) is None
    (letter,) = tokenizer.encode("a", add_special_tokens=False).ids
    longest, error = 0.0, None
    for _ in range(3000):
        start = time.thread_time()
        try:
            manager.accept(KEY, letter)
        except InvalidRequest as refusal:
            error = refusal
            break
        longest = max(longest, time.thread_time() - start)
    assert error is not None and error.field == "structured_output"
    assert "ambiguous" in error.message
    assert longest < 1.0


def test_only_constrained_rows_are_masked_in_order(
    manager: StructuredOutputManager, wakeup: Wakeup
) -> None:
    other: RequestKey = ("other", 3)
    assert manager.fill_bitmask([request(), request(other)]) is None
    assert ready(manager, wakeup, OBJECT) is None
    assert ready(manager, wakeup, schema({"type": "array"}), other) is None
    batch = [request(("free", 0)), request(other), request(("free", 1)), request()]
    mask = manager.fill_bitmask(batch)
    assert mask is not None
    assert mask.rows == [1, 3]
    assert mask.words_GW.shape == (2, -(-PADDED // 32))
    assert not mask.words_GW[0].equal(mask.words_GW[1])
    manager.release(other)
    mask = manager.fill_bitmask(batch)
    assert mask is not None
    assert mask.rows == [3]


def test_samples_of_one_schema_compile_once_and_go_their_own_ways(
    manager: StructuredOutputManager, wakeup: Wakeup, tokenizer: Tokenizer
) -> None:
    spec = schema({"enum": ["ab", "cd"]})
    keys: list[RequestKey] = [("n", i) for i in range(4)]
    for key in keys:
        manager.submit(key, spec)
    news: list[tuple[RequestKey, Failure | None]] = []
    while len(news) < len(keys):
        wakeup.wait()
        news += manager.poll()
    assert news == [(key, None) for key in keys]
    (quote,) = tokenizer.encode('"', add_special_tokens=False).ids
    manager.accept(keys[1], quote)
    assert quote in allowed(manager, keys[0])
    assert quote not in allowed(manager, keys[1])
    late: RequestKey = ("late", 0)
    manager.submit(late, schema({"enum": ["ab", "cd"]}))  # cached: no compilation to wait for
    assert manager.poll() == [(late, None)]
    wakeup.wait()
    for key in (*keys, late):
        manager.release(key)


def test_release_before_the_grammar_is_there_leaves_nothing(
    manager: StructuredOutputManager, wakeup: Wakeup
) -> None:
    gone: RequestKey = ("gone", 0)
    manager.submit(gone, schema({"enum": ["never seen before"]}))
    manager.release(gone)
    manager.release(("unknown", 5))
    assert ready(manager, wakeup, schema({"enum": ["after it"]})) is None
    assert manager.fill_bitmask([request(gone)]) is None
    manager.submit(gone, OBJECT)
    manager.release(gone)
    assert all(key != gone for key, _ in manager.poll())


def test_the_cache_is_limited_in_bytes(
    embedded_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_output, "MAX_CACHE_BYTES", 10_000)
    woken = Wakeup()
    specs = [schema({"enum": [f"{i}-{j}" for j in range(100)]}) for i in range(6)]
    with new_manager(embedded_model_dir, woken) as manager:
        for i, spec in enumerate(specs):
            assert ready(manager, woken, spec, ("c", i)) is None
        manager.submit(KEY, specs[-1])
        assert manager.poll() == [(KEY, None)]
        manager.submit(("again", 0), specs[0])
        assert manager.poll() == []  # evicted: compiled anew


def test_compiling_leaves_other_threads_running(
    manager: StructuredOutputManager, wakeup: Wakeup
) -> None:
    assert ready(manager, wakeup, OBJECT, ("first", 0)) is None  # with all that is loaded once
    manager.release(("first", 0))

    def goes_on_meanwhile(number: int) -> bool:
        """This thread polls all the time while one compiles."""
        key = ("large", number)
        manager.submit(key, schema({"enum": [f"value {number} {i}" for i in range(8000)]}))
        began = last = time.monotonic()
        longest, news = 0.0, manager.poll()
        while not news:
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            time.sleep(0.001)
            news = manager.poll()
        assert news == [(key, None)]
        return longest < max(0.25, 0.25 * (last - began))

    # A busy machine stops this thread, too, but not each time.
    assert any(goes_on_meanwhile(number) for number in range(5))


def test_a_model_without_an_end_token_stops_when_the_text_is_complete(
    embedded_model_dir: Path, tokenizer: Tokenizer
) -> None:
    woken = Wakeup()
    with new_manager(embedded_model_dir, woken, eos=()) as manager:
        assert ready(manager, woken, schema({"enum": ["ab"]})) is None
        for token_id in tokenizer.encode('"ab"', add_special_tokens=False).ids:
            assert not manager.is_terminated(KEY)
            manager.accept(KEY, token_id)
        assert manager.is_terminated(KEY)


def test_a_broken_tokenizer_fails_the_requests_that_need_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The service refuses such a model; who breaks it later loses grammars, and nothing else."""
    (tmp_path / "tokenizer.json").write_text("{}")
    for directory in (tmp_path, tmp_path / "nowhere"):
        woken = Wakeup()
        with new_manager(directory, woken) as manager:
            failure = ready(manager, woken, OBJECT)
        assert failure is not None
        assert failure.reason == "INTERNAL_ERROR"
        assert "tokenizer.json is not a usable tokenizer" in caplog.text
        caplog.clear()


def test_a_grammar_without_a_way_on_fails_its_request_by_field(
    manager: StructuredOutputManager, wakeup: Wakeup, tokenizer: Tokenizer
) -> None:
    dead_end = StructuredOutput("regex", r"x[^\s\S]")
    assert ready(manager, wakeup, dead_end) is None
    for token_id in tokenizer.encode("x", add_special_tokens=False).ids:
        manager.accept(KEY, token_id)
    neighbour = request(("other", 0))
    bitmask = manager.fill_bitmask([request(), neighbour])
    planned = plan_sampling([request(), neighbour], bitmask, PADDED, reference_sampling_ops())
    stuck, sound = planned.launch(torch.zeros(2, PADDED)).wait().tokens
    assert stuck.failure is not None
    assert (stuck.failure.reason, stuck.failure.field) == ("INVALID_VALUE", "structured_output")
    assert sound.failure is None
