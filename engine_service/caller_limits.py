"""The limits of a caller's key at the gRPC edge: generations at once and a minute, and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from access import limits
from access.keys import ApiKey
from access.limits import Allowance, KeyLimits
from engine_service.errors import RateLimited
from engine_service.messages import AddRequest

Refuse = Callable[[limits.RateLimited], RateLimited]


class CallAllowance:
    """What one generation may use; without a key, all it wants."""

    def __init__(self, allowance: Allowance | None, refuse: Refuse) -> None:
        self._allowance = allowance
        self._refuse = refuse
        self.used_tokens = 0  # prompt and answers, as far as they were computed

    def reserve(self, request: AddRequest) -> None:
        """Its prompt, and the most that it may generate. Raises RateLimited."""
        if self._allowance is None:
            return
        num_tokens = len(request.prompt_token_ids) + request.n * request.stopping.max_tokens
        try:
            self._allowance.reserve_tokens(num_tokens)
        except limits.RateLimited as error:
            raise self._refuse(error) from None


class CallerLimits:
    def __init__(self, on_refused: Callable[[RateLimited], None]) -> None:
        """`on_refused` is told before anything is raised."""
        self._limits = KeyLimits()
        self._on_refused = on_refused

    @contextmanager
    def generation(self, key: ApiKey | None) -> Iterator[CallAllowance]:
        """Counts it as one of the key's. Raises RateLimited."""
        if key is None:
            yield CallAllowance(None, self._refusal)
            return
        try:
            allowance = self._limits.enter(key.id, key.limits)
        except limits.RateLimited as error:
            raise self._refusal(error) from None
        call = CallAllowance(allowance, self._refusal)
        try:
            yield call
        finally:
            allowance.leave(call.used_tokens)

    def _refusal(self, error: limits.RateLimited) -> RateLimited:
        refusal = RateLimited(error.message, retry_after_seconds=error.retry_after_seconds)
        self._on_refused(refusal)
        return refusal
