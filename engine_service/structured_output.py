"""Grammars of live requests: compiled once each, one matcher per sample, one bitmask per step.

    submit -> (compiling, elsewhere) -> poll -> fill_bitmask, accept, ... -> release

A grammar that nobody waits for any more is not compiled, unless the compiler is already at it.

A matcher follows the output tokens and lives as long as its request, preempted or not. It allows
an end token only where the text is complete, and nothing else where it is complete and cannot go
on. JSON is written on one line with ", " and ": " and no other whitespace outside of strings; an
object holds the properties its schema names, in that order, and no others unless
`additionalProperties` asks for them. json_object is any JSON object.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from engine_service.config import GrammarConfig
from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.grammar_compiler import GrammarCompiler
from engine_service.grammar_matcher import RequestMatcher
from engine_service.grammar_worker import GrammarWorker
from engine_service.messages import Failure, StructuredOutput
from engine_service.request import Request, RequestKey

if TYPE_CHECKING:
    import xgrammar  # loaded with the first grammar (see `grammar_compiler`)

MAX_CACHE_BYTES: Final = 64 * 1024 * 1024


class StructuredOutputManager:
    """Used by one thread. `on_ready` is called by another, whenever `poll` has news."""

    def __init__(
        self,
        model_dir: str | Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        on_ready: Callable[[], None],
        config: GrammarConfig,
    ) -> None:
        self._vocab_size = vocab_size
        self._ends_without_token = not eos_token_ids
        self._compiler = GrammarCompiler(
            GrammarWorker(Path(model_dir), vocab_size, tuple(eos_token_ids), config), on_ready
        )
        self._prepared = False
        self._cache = _GrammarCache(MAX_CACHE_BYTES)
        # For a compilation, in order of submission; of nobody: it runs on for the cache alone.
        self._waiting: dict[StructuredOutput, dict[RequestKey, None]] = {}
        self._awaited: dict[RequestKey, StructuredOutput] = {}  # the same, by key
        self._ready: dict[RequestKey, None] = {}  # for the next poll, in order
        self._matchers: dict[RequestKey, RequestMatcher] = {}
        self._words_GW = torch.empty((0, 0), dtype=torch.int32)  # of the last step; grows
        self._on_ready = on_ready

    def submit(self, key: RequestKey, spec: StructuredOutput) -> bool:
        """`poll` will name the key, once, unless it is released before. Whether it is in the cache:
        nothing is to be compiled for it."""
        grammar = self._cache.get(spec)
        if grammar is not None:
            self._matchers[key] = self._new_matcher(grammar)
            self._ready[key] = None
            self._on_ready()
            return True
        if spec not in self._waiting:
            self._waiting[spec] = {}
            self._compiler.start(spec)
        self._waiting[spec][key] = None
        self._awaited[key] = spec
        return False

    def poll(self) -> list[tuple[RequestKey, Failure | None]]:
        """Keys whose grammar became ready, or why it did not; never waits."""
        news: list[tuple[RequestKey, Failure | None]] = [(key, None) for key in self._ready]
        self._ready.clear()
        for spec, result in self._compiler.take_finished():
            keys = self._waiting.pop(spec)
            for key in keys:
                del self._awaited[key]
            if isinstance(result, Failure):
                news += [(key, result) for key in keys]
                continue
            self._cache.put(spec, result)
            for key in keys:
                self._matchers[key] = self._new_matcher(result)
                news.append((key, None))
        return news

    def take_compile_times_ns(self) -> list[int]:
        """Of each grammar that was compiled, or found to be bad, since the last call."""
        return self._compiler.take_times_ns()

    def fill_bitmask(self, sampling: Sequence[Request]) -> GrammarBitmask | None:
        """What may come next, for those of a step's sampling requests that have a grammar.

        Valid until the next call."""
        rows = [row for row, request in enumerate(sampling) if request.key in self._matchers]
        if not rows:
            return None
        words = [self._matchers[sampling[row].key].words_W for row in rows]
        if len(rows) > len(self._words_GW):
            self._words_GW = torch.empty((2 * len(rows), len(words[0])), dtype=torch.int32)
        words_GW = self._words_GW[: len(rows)]
        torch.stack(words, out=words_GW)
        return GrammarBitmask(rows, words_GW)

    def accept(self, key: RequestKey, token_id: int) -> None:
        """Raises an EngineError, which concerns this request only."""
        self._matchers[key].accept(token_id)

    def take_forced_token(self, key: RequestKey) -> int | None:
        """Accepts the only token that may come next, and returns it; None: there is a choice."""
        return self._matchers[key].take_forced_token()

    def is_terminated(self, key: RequestKey) -> bool:
        """Whether the text is complete and its end was accepted."""
        return self._matchers[key].is_terminated

    def release(self, key: RequestKey) -> None:
        """Forgets the request, in whatever state; unknown keys are ignored."""
        self._matchers.pop(key, None)
        self._ready.pop(key, None)
        spec = self._awaited.pop(key, None)
        if spec is None:
            return
        keys = self._waiting[spec]
        del keys[key]
        if not keys and self._compiler.cancel(spec):
            del self._waiting[spec]

    def prepare(self) -> None:
        """There is leisure to load what the first grammar would wait for; does nothing twice."""
        if not self._prepared:
            self._prepared = True
            self._compiler.prepare()

    def close(self) -> None:
        """No grammar becomes ready any more."""
        self._compiler.close()

    def _new_matcher(self, grammar: xgrammar.CompiledGrammar) -> RequestMatcher:
        return RequestMatcher(
            grammar, self._vocab_size, ends_without_token=self._ends_without_token
        )


class _GrammarCache:
    """Compiled grammars by their source, the least recently used one evicted first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._grammars: OrderedDict[StructuredOutput, xgrammar.CompiledGrammar] = OrderedDict()

    def get(self, spec: StructuredOutput) -> xgrammar.CompiledGrammar | None:
        grammar = self._grammars.get(spec)
        if grammar is not None:
            self._grammars.move_to_end(spec)
        return grammar

    def put(self, spec: StructuredOutput, grammar: xgrammar.CompiledGrammar) -> None:
        """Keeps the newest even when it alone is larger than the limit."""
        self._grammars[spec] = grammar
        self._num_bytes += _size(spec, grammar)
        while self._num_bytes > self._max_bytes and len(self._grammars) > 1:
            self._num_bytes -= _size(*self._grammars.popitem(last=False))


def _size(spec: StructuredOutput, grammar: xgrammar.CompiledGrammar) -> int:
    return grammar.memory_size_bytes + len(spec.source)
