"""What happened within a stage of a sample, as events of the stage's span: waits and chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from engine_service.messages import PrefillChunk, Wait
from traces import names
from traces.clock import unix_ns

_RUNNING_STEP: Final = "running_step"
_TO_CORE: Final = "to_core"


def add_mailbox_wait(span: Span, submitted_ns: int, taken_ns: int, *, for_step: bool) -> None:
    """On its way to the core, and in its mailbox. `for_step`: a step ran when it came, to whose
    end it had to wait."""
    if submitted_ns < taken_ns:
        _add_wait(span, _RUNNING_STEP if for_step else _TO_CORE, submitted_ns, taken_ns)


def add_waits(span: Span, waits: Iterable[Wait]) -> None:
    for wait in waits:
        _add_wait(span, wait.reason.name.lower(), wait.start_ns, wait.end_ns)


def add_chunks(span: Span, chunks: Iterable[PrefillChunk]) -> None:
    for chunk in chunks:
        attributes: dict[str, AttributeValue] = {
            names.STEP_ID: chunk.step_id,
            names.CHUNK_TOKENS: chunk.num_tokens,
            names.CHUNK_STEP_TOKENS: chunk.num_step_tokens,
            names.CHUNK_SCHEDULE_US: (chunk.start_ns - chunk.scheduled_ns) // 1_000,
            names.CHUNK_DURATION_US: (chunk.end_ns - chunk.start_ns) // 1_000,
        }
        span.add_event(names.EVENT_PREFILL_CHUNK, attributes, unix_ns(chunk.end_ns))


def _add_wait(span: Span, reason: str, start_ns: int, end_ns: int) -> None:
    attributes: dict[str, AttributeValue] = {
        names.WAIT_REASON: reason,
        names.WAIT_DURATION_US: (end_ns - start_ns) // 1_000,
    }
    span.add_event(names.EVENT_WAIT, attributes, unix_ns(start_ns))
