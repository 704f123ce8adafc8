"""How many files this process may have open: each connection is one."""

from __future__ import annotations

import logging
import resource

# What is neither a connection nor one over the limit: engines, traces, TLS handshakes, the rest.
_OTHER_FILES = 512

logger = logging.getLogger(__name__)


def allow_connections(wanted: int) -> int:
    """Raises the process's own limit as far as that takes; how many connections it then allows."""
    needed = wanted + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = max(soft - _OTHER_FILES, soft // 2)
    logger.warning(
        "the system lets this process open %d files: at most %d connections are taken (ulimit -n)",
        soft,
        allowed,
    )
    return allowed
