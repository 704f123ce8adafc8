"""How a process knows that a trace is held: recorded although it is not sampled, in case that its
first token turns out slow. `tracestate` tells, in every process that the trace passes."""

from __future__ import annotations

from typing import Final

from opentelemetry.trace import SpanContext, TraceState

_KEY: Final = "firsttoken"
_HELD: Final = "held"


def held_state() -> TraceState:
    """Of a trace that begins to be held."""
    return TraceState([(_KEY, _HELD)])


def without_held(state: TraceState) -> TraceState:
    """For a trace that is not: whoever says so is not believed, nor passed on."""
    return state.delete(_KEY) if _KEY in state else state


def is_held(context: SpanContext) -> bool:
    return not context.trace_flags.sampled and context.trace_state.get(_KEY) == _HELD
