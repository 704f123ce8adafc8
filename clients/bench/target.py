"""What a load is sent to: a server of either protocol, reached and asked for its model."""

from __future__ import annotations

import enum
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from clients.bench.answer import Answer
from clients.bench.workloads import Prompt

# Sends one prepared request and fills the answer in. Never raises for what the server does; a
# cancelled one leaves what had come by then.
Call = Callable[[Answer], Coroutine[None, None, None]]


class Api(enum.Enum):
    COMPLETIONS = "completions"
    CHAT = "chat"


class TargetError(Exception):
    """The server cannot be measured at all: out of reach, or it does not say its model."""


@dataclass(frozen=True, slots=True)
class TargetOptions:
    model: str | None = None  # None: the first that the server lists
    api_key: str | None = field(default=None, repr=False)
    api: Api | None = None  # None: chat for prompts with a schema, else completions
    is_ignoring_eos: bool = True  # but for answers with a schema, which end by themselves
    timeout_seconds: float = 600.0  # of one request
    extra_fields: Mapping[str, object] = field(default_factory=dict)  # of HTTP bodies
    sends_text: bool = False  # gRPC: prompts as text for the engine to tokenize, not as ids

    def api_for(self, prompt: Prompt) -> Api:
        if self.api is not None:
            return self.api
        return Api.CHAT if prompt.has_schema else Api.COMPLETIONS


class Target(Protocol):
    @property
    def address(self) -> str: ...

    @property
    def model(self) -> str: ...

    def prepare(self, prompt: Prompt) -> Call:
        """All that can be done before the clock runs: encoding, tokenizing."""
