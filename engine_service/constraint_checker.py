"""Constraints are checked at the door, once for each source: a bad one never reaches the core."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from engine_service.constraint import Constraint
from engine_service.messages import StructuredOutput
from engine_service.regex_check import check_regex
from engine_service.schema_check import CheckedSchema, check_schema
from engine_service.structural_tag import CheckedTag, check_structural_tag

MAX_CACHE_BYTES: Final = 16 * 1024 * 1024  # of sources, as given and as checked


@dataclass(frozen=True, slots=True)
class CheckedConstraint:
    output: StructuredOutput  # may differ from what was given: equivalent, or relaxed
    relaxed: tuple[str, ...] = ()  # places of schema keywords that were dropped


class ConstraintChecker:
    """Used by one event loop."""

    def __init__(self, max_cache_bytes: int = MAX_CACHE_BYTES) -> None:
        self._max_cache_bytes = max_cache_bytes
        self._num_cached_bytes = 0
        self._checked: OrderedDict[Constraint, CheckedConstraint] = OrderedDict()  # oldest first
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")

    async def check(self, constraint: Constraint) -> CheckedConstraint:
        """Raises InvalidRequest naming the field and the place in it."""
        checked = self._checked.get(constraint)
        if checked is not None:
            self._checked.move_to_end(constraint)
            return checked
        # Even a short source may take some tenths of a second, in which tokens must flow.
        loop = asyncio.get_running_loop()
        checked = await loop.run_in_executor(self._thread, check_constraint, constraint)
        self._keep(constraint, checked)
        return checked

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _keep(self, constraint: Constraint, checked: CheckedConstraint) -> None:
        if constraint not in self._checked:  # or another request had it checked meanwhile
            self._checked[constraint] = checked
            self._num_cached_bytes += _size(constraint, checked)
        while self._num_cached_bytes > self._max_cache_bytes:
            self._num_cached_bytes -= _size(*self._checked.popitem(last=False))


def check_constraint(constraint: Constraint) -> CheckedConstraint:
    output, relax = constraint.output, constraint.relax_unenforced
    checked: CheckedSchema | CheckedTag
    match output.kind:
        case "json_schema":
            checked = check_schema(output.source, relax=relax)
        case "structural_tag":
            checked = check_structural_tag(output.source, relax=relax)
        case "regex":
            check_regex(output.source, field=output.field)
            return CheckedConstraint(output)
        case "grammar" | "choice" | "json_object":  # the compiler knows what is wrong with them
            return CheckedConstraint(output)
    return CheckedConstraint(StructuredOutput(output.kind, checked.text), checked.relaxed)


def _size(constraint: Constraint, checked: CheckedConstraint) -> int:
    return len(constraint.output.source) + len(checked.output.source)
