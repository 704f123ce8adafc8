"""What the parts of a time to first token come down to, and which knob would have helped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from traces.explain.parts import WAIT_PREFIX, Part


@dataclass(frozen=True, slots=True)
class Kind:
    """A cause: what it says of a request, and what to do about it."""

    name: str
    says: str  # "... of its time went to" this
    knob: str


OTHERS: Final = Kind(
    "work_of_others",
    "the work of other requests in its steps, or in those it waited for",
    "--long-prefill-token-threshold caps what one long prompt takes of a step, --target-itl-ms"
    " what all prompts do; a larger --max-num-batched-tokens lets more prompts in at once",
)
NO_BLOCKS: Final = Kind(
    "no_blocks",
    "waiting for blocks of a KV cache that was full",
    "--kv-cache-memory-bytes (or --gpu-memory-utilization) for more blocks, --kv-cache-dtype for"
    " smaller ones; or shorter answers (max_tokens)",
)
NO_SLOT: Final = Kind(
    "no_slot",
    "waiting for a place among the running requests",
    "--max-num-seqs lets more run at once; if the machine is full, more engines behind the facade",
)
FAIR_SHARE: Final = Kind(
    "fair_share",
    "the turn of other tenants, which had had less",
    "--tenant-weights, or the request's priority",
)
GRAMMAR: Final = Kind(
    "grammar",
    "the compilation of its grammar",
    "a simpler schema; an equal one is compiled once, so send it byte for byte the same, and once"
    " before the first user does",
)
PREFIX: Final = Kind(
    "prefix_in_flight",
    "waiting for another request to compute the prefix that both have",
    "none: computing it twice would have taken longer",
)
PREFILL: Final = Kind(
    "prefill",
    "computing its own prompt",
    "a shorter prompt, or one whose beginning is cached (see what is said of its prefix)",
)
UPLOAD: Final = Kind(
    "upload",
    "the way of the request's body from its caller, and the reading of it",
    "a caller that is nearer, or sends less; --workers, if many large requests come at once",
)
FACADE: Final = Kind(
    "facade",
    "checking, templating and tokenizing the request",
    "--workers, if many requests come at once; else a shorter prompt",
)
HOLD_BACK: Final = Kind(
    "hold_back",
    "tokens that made no text yet: parts of a character, of a stop string, of a call or a thought",
    "stop strings that begin with rarer text, or none; shorter names of tools, as a call is shown"
    " from its arguments on; include_reasoning, as a thought that is left out takes its time",
)
WRITING: Final = Kind("writing", "writing the first bytes", "a client that reads faster; --workers")
NETWORK: Final = Kind(
    "network",
    "the way between facade and engine",
    "engine and facade on one machine; --workers, if the facade was busy",
)
RETRIES: Final = Kind(
    "retries",
    "engines that refused it or were lost",
    "more engines, or longer queues (--max-num-queued-reqs)",
)
LOST: Final = Kind(
    "core_died",
    "an engine's core that died, and with it what it knew of this time",
    "the engine's log, which says why",
)
UNSEEN: Final = Kind(
    "engine_unseen",
    "an engine whose spans are not in this store: it died, or writes them elsewhere",
    "`firsttoken ttft` where the engine's store is (--trace-dir), or one collector for both"
    " (--otlp-traces-endpoint)",
)
ENGINE: Final = Kind(
    "engine_bookkeeping",
    "the engine's own bookkeeping",
    "a processor that the engine has for itself; fewer requests at once (--max-num-seqs)",
)

KINDS: Final = (
    *(OTHERS, NO_BLOCKS, NO_SLOT, FAIR_SHARE, GRAMMAR, PREFIX, PREFILL, UPLOAD, FACADE, HOLD_BACK),
    *(WRITING, NETWORK, RETRIES, LOST, UNSEEN, ENGINE),
)

_KIND_OF_PART: Final[Mapping[str, Kind]] = {
    "read_body": UPLOAD,
    "parse": FACADE,
    "plan": FACADE,
    "render": FACADE,
    "tokenize": FACADE,
    "open_call": FACADE,
    "retries": RETRIES,
    "network": NETWORK,
    "engine": UNSEEN,
    "admit": ENGINE,
    "lost": LOST,
    f"{WAIT_PREFIX}running_step": OTHERS,
    f"{WAIT_PREFIX}to_core": ENGINE,
    f"{WAIT_PREFIX}not_seen": ENGINE,
    f"{WAIT_PREFIX}grammar": GRAMMAR,
    f"{WAIT_PREFIX}prefix_in_flight": PREFIX,
    f"{WAIT_PREFIX}no_slot": NO_SLOT,
    f"{WAIT_PREFIX}no_budget": OTHERS,
    f"{WAIT_PREFIX}no_blocks": NO_BLOCKS,
    f"{WAIT_PREFIX}turn": FAIR_SHARE,
    "schedule": ENGINE,
    "prefill": PREFILL,
    "abandoned": PREFILL,
    "prefill_others": OTHERS,
    "between_steps": ENGINE,
    "emit": ENGINE,
    "wake": ENGINE,
    "write": ENGINE,
    "first_text": HOLD_BACK,
    "first_write": WRITING,
}


@dataclass(frozen=True, slots=True)
class Cause:
    kind: Kind
    seconds: float


def kind_of(part_name: str) -> Kind:
    """A part of a newer engine is the engine's."""
    return _KIND_OF_PART.get(part_name, ENGINE)


def causes_of(parts: Sequence[Part]) -> list[Cause]:
    """The largest first."""
    seconds: dict[str, float] = {}
    for part in parts:
        name = kind_of(part.name).name
        seconds[name] = seconds.get(name, 0.0) + part.seconds
    causes = [Cause(kind, seconds[kind.name]) for kind in KINDS if kind.name in seconds]
    return sorted(causes, key=lambda cause: -cause.seconds)
