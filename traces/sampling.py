"""Which spans are recorded: the caller's decision holds; of the traces that begin here a share is
sampled, and the others may be held.

    decision   recorded   exported                   traceparent   tracestate
    sampled    yes        yes                        01            as it came
    held       yes        if somebody keeps it       00            firsttoken=held
    dropped    no         no                         00            as it came

A held trace is known by its `tracestate` in every process that it passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from traces.held import held_state, is_held, without_held


class FirstTokenSampler(Sampler):
    """`holds`: what is not sampled of the traces that begin here is held. `trusts_callers`: so is
    what a caller says is held; a front that anybody can reach must not believe it."""

    def __init__(self, ratio: float, *, holds: bool, trusts_callers: bool) -> None:
        self._ratio = TraceIdRatioBased(ratio)
        self._holds = holds
        self._trusts_callers = trusts_callers

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        parent = trace.get_current_span(parent_context).get_span_context()
        if parent.is_valid:
            return self._like(parent, attributes)
        if links:  # a step: of interest as long as one of the requests is that it touched
            is_sampled = any(link.context.trace_flags.sampled for link in links)
            decision = Decision.RECORD_AND_SAMPLE if is_sampled else Decision.RECORD_ONLY
            return SamplingResult(decision, attributes)
        result = self._ratio.should_sample(None, trace_id, name, kind, attributes, links)
        if result.decision is Decision.RECORD_AND_SAMPLE or not self._holds:
            return result
        return SamplingResult(Decision.RECORD_ONLY, attributes, held_state())

    def get_description(self) -> str:
        return f"FirstTokenSampler{{{self._ratio.rate}}}"

    def _like(self, parent: SpanContext, attributes: Attributes) -> SamplingResult:
        if parent.trace_flags.sampled:
            decision = Decision.RECORD_AND_SAMPLE
        elif is_held(parent) and (self._trusts_callers or not parent.is_remote):
            decision = Decision.RECORD_ONLY
        else:
            return SamplingResult(Decision.DROP, attributes, without_held(parent.trace_state))
        return SamplingResult(decision, attributes, parent.trace_state)
