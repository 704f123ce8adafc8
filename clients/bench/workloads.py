"""The workloads: which prompts, how long their answers, how many of them.

    w1  distinct prompts of about 60 tokens, 64 tokens out
    w2  one shared prefix of about 1,500 tokens and 40 distinct ones, 32 out
    w3  distinct prompts of about 1,024 tokens, 32 out
    w4  an object by a JSON schema, at most 64 out, over the chat API
    w5  w1's streams for some seconds, without (w5-base) and with long prompts that arrive in them

A prompt is a pure function of (seed, workload, concurrency, index): a new seed finds nothing in a
prefix cache that is already warm, and neither does another concurrency of the same seed. Sizes are
in words; the server's own count is what gets reported.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, replace
from typing import Final, Self

from clients.bench.words import WORDS

FIRST_INDEX: Final = 1000  # of the timed prompts; those of the warm-up count down from it

PERSON_SCHEMA: Final[dict[str, object]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


class Workload(enum.Enum):
    W1 = "w1"
    W2 = "w2"
    W3 = "w3"
    W4 = "w4"
    W5_BASE = "w5-base"
    W5 = "w5"

    @property
    def is_window(self) -> bool:
        """Whether it lasts some seconds instead of some requests."""
        return self in (Workload.W5_BASE, Workload.W5)

    @property
    def num_warmup(self) -> int:
        """Requests before the clock starts, where nobody says otherwise."""
        return 1 if self in (Workload.W1, Workload.W2, Workload.W4) else 0

    def num_requests(self, concurrency: int) -> int:
        """How many make a run, where nobody says otherwise; 0 for a window."""
        if self is Workload.W1:
            return max(6, 3 * concurrency)
        return {Workload.W2: 24, Workload.W3: 8, Workload.W4: 24}.get(self, 0)


class PromptKind(enum.Enum):
    """The values are part of a prompt's seed."""

    W1 = "w1"
    W2 = "w2"
    W3 = "w3"
    W4 = "w4"
    LONG = "long"


# Of the workloads that last some requests; a window's streams are w1's.
PROMPT_KINDS: Final = {
    Workload.W1: PromptKind.W1,
    Workload.W2: PromptKind.W2,
    Workload.W3: PromptKind.W3,
    Workload.W4: PromptKind.W4,
    Workload.W5_BASE: PromptKind.W1,
    Workload.W5: PromptKind.W1,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """In tokens, about; None: the workload's own."""

    prompt_tokens: int | None = None  # of w1 and w3
    prefix_tokens: int = 1500  # of w2
    max_tokens: int | None = None  # of an answer, but for the long prompts of w5
    long_prompt_tokens: int = 3000
    long_max_tokens: int = 8


@dataclass(frozen=True, slots=True)
class Window:
    """The course of w5, in seconds.

    0            start          + interval      duration          + grace
    ├── streams ──┼── a long one ──┼── another … ──┼── no new ones ──┤ cut off
    """

    duration_seconds: float = 10.0
    grace_seconds: float = 25.0
    num_long: int = 2  # 0: none, the baseline
    long_start_seconds: float = 1.0
    long_interval_seconds: float = 2.0

    def baseline(self) -> Self:
        """Half as long, and no long prompts."""
        return replace(self, duration_seconds=self.duration_seconds / 2, num_long=0)


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: PromptKind
    text: str
    max_tokens: int

    @property
    def has_schema(self) -> bool:
        """Whether its answer is to follow `PERSON_SCHEMA`."""
        return self.kind is PromptKind.W4


@dataclass(frozen=True, slots=True)
class PromptSource:
    seed: str
    concurrency: int
    sizes: Sizes = Sizes()

    def prompt(self, kind: PromptKind, index: int) -> Prompt:
        rng = random.Random(f"{self.seed}:{kind.value}:{self.concurrency}:{index}")
        sizes = self.sizes
        match kind:
            case PromptKind.W1:
                text, max_tokens = _words(rng, sizes.prompt_tokens or 60), 64
            case PromptKind.W2:
                prefix = _words(random.Random(f"{self.seed}:shared"), sizes.prefix_tokens)
                text, max_tokens = f"{prefix} {_words(rng, 40)}", 32
            case PromptKind.W3:
                text, max_tokens = _words(rng, sizes.prompt_tokens or 1024), 32
            case PromptKind.W4:
                likes = _words(rng, 12)
                text, max_tokens = _PERSON_PROMPT.format(likes=likes), 64
            case PromptKind.LONG:
                long_text = _words(rng, sizes.long_prompt_tokens)
                return Prompt(kind, long_text, sizes.long_max_tokens)
        return Prompt(kind, text, sizes.max_tokens or max_tokens)


_PERSON_PROMPT: Final = (
    "Write a JSON object with the keys name, age and tags for a person who likes {likes}. "
    "Answer with JSON only."
)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))
