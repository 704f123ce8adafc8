"""Why a prompt's beginning was computed although an equal one had been before.

earlier request   |<---- equal hashes: a common prefix of at least this ---->|
this one          |<- cached ->|<------ computed again: why? ------------->|

their salts differ        they may not share what is cached
the salts are equal       the blocks were evicted, or the cache was flushed, or is off
equal first messages,     the template, its arguments or the tools put something else before
but no common prefix      or into what would have been common
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from traces import names
from traces.request_view import RequestView, number_of, text_of

_SHORTEST_TOKENS = 16  # of the prefixes that are hashed: this, then twice as many each
_CHARS_PER_TOKEN = 4  # at most, roughly: a message of so many characters is at least one token
_MIN_FIRST_MESSAGE_CHARS = 4 * _SHORTEST_TOKENS * _CHARS_PER_TOKEN


@dataclass(frozen=True, slots=True)
class PrefixReuse:
    prompt_tokens: int
    cached_tokens: int
    missed: str = ""  # salt, evicted, template; empty: nothing, as far as the store knows
    missed_tokens: int = 0  # at least; 0 where the template changed
    earlier_trace_id: str = ""  # whose prefix it was

    @property
    def is_cached(self) -> bool:
        """All but what a prefix that ends within a block, or at the last token, leaves over."""
        return self.prompt_tokens - self.cached_tokens < _SHORTEST_TOKENS <= self.cached_tokens


def prefix_reuse(view: RequestView, others: Iterable[RequestView] = ()) -> PrefixReuse | None:
    """`others`: requests of the store, of which those that were computed before count. None: the
    prompt never was looked up."""
    prefill = view.call.stages.get(names.SPAN_PREFILL) if view.call else None
    if view.call is None or prefill is None:
        return None
    prompt_tokens = number_of(view.call.server, names.PROMPT_TOKENS)
    cached_tokens = number_of(prefill, names.CACHED_TOKENS)
    began = view.call.server["start_unix_ns"]
    best = PrefixReuse(prompt_tokens, cached_tokens)
    for other in others:
        if other is view or other.call is None or names.SPAN_PREFILL not in other.call.stages:
            continue
        if other.call.stages[names.SPAN_PREFILL]["end_unix_ns"] > began:
            continue
        missed = _missed(view, other, best)
        if missed is not None:
            best = missed
    return best


def _missed(view: RequestView, other: RequestView, best: PrefixReuse) -> PrefixReuse | None:
    """What `other` would have had for it, if that is more than is known of yet."""
    if view.call is None or other.call is None:
        return None
    common = _common_tokens(_hashes(view), _hashes(other))
    salts = [text_of(call.server, names.PREFIX_SALT) for call in (view.call, other.call)]
    least = max(best.cached_tokens, best.missed_tokens)
    if common > least:
        why = "salt" if salts[0] != salts[1] else "evicted"
        return PrefixReuse(best.prompt_tokens, best.cached_tokens, why, common, other.trace_id)
    if not best.missed and salts[0] == salts[1] and _template_changed(view, other, common):
        return PrefixReuse(best.prompt_tokens, best.cached_tokens, "template", 0, other.trace_id)
    return None


def _template_changed(view: RequestView, other: RequestView, common_tokens: int) -> bool:
    renders = [v.facade_stages.get(names.SPAN_RENDER) for v in (view, other)]
    ours, theirs = renders
    if ours is None or theirs is None:
        return False
    is_same = text_of(ours, names.FIRST_MESSAGE) == text_of(theirs, names.FIRST_MESSAGE) != ""
    num_chars = number_of(ours, names.FIRST_MESSAGE_CHARS)
    return (
        is_same
        and num_chars >= _MIN_FIRST_MESSAGE_CHARS
        and common_tokens * _CHARS_PER_TOKEN * 2 < num_chars
    )


def _common_tokens(ours: list[str], theirs: list[str]) -> int:
    """At least so many are equal."""
    count = 0
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            break
        count += 1
    return _SHORTEST_TOKENS << (count - 1) if count else 0


def _hashes(view: RequestView) -> list[str]:
    value = view.call.server["attributes"].get(names.PREFIX_HASHES) if view.call else None
    return [str(item) for item in value] if isinstance(value, list) else []
