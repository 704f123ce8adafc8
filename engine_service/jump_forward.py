"""Jump-forward: where its grammar leaves a request no choice, the token is taken without a step.

The model would be asked for a token and could give only one. So the ids are the same with it or
without; what is saved is a step, for the token's KV is computed together with the next one's.
"""

from __future__ import annotations

from engine_service.request import Request
from engine_service.request_output import Grammars


def take_forced_token(request: Request, grammars: Grammars) -> int | None:
    """The only token that may come next, accepted by the grammar already; None: there is a
    choice, or something besides the grammar has a say."""
    if request.structured_output is None or not _is_free(request):
        return None
    return grammars.take_forced_token(request.key)


def _is_free(request: Request) -> bool:
    """Whether nothing but its grammar could forbid a token, and nobody asks for its logits."""
    params = request.sampling
    return (
        params.num_logprobs is None
        and not params.allowed_token_ids
        and not params.bad_token_sequences
        and request.num_output_tokens >= request.stopping.min_tokens
    )
