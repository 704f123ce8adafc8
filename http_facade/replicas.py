"""What engines of one name have in common, which should be replicas of each other.

Where they are not, token ids made for one must not reach another: requests keep to the engines that
have one tokenizer, that of most ready engines. Other differences are allowed: a new version of the
weights may be on its way, or one engine may have another device.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from http_facade.engine import EngineConnection, ServedModel

logger = logging.getLogger(__name__)


def common_model(engines: Sequence[EngineConnection]) -> ServedModel:
    """What requests are made for, of the engines that were ever ready, at least one."""
    votes = [engine for engine in engines if engine.is_ready] or engines
    digests = Counter(model.info.tokenizer_digest for model in _models(votes))
    leading, _ = digests.most_common(1)[0]  # of equals the one met first
    models = [m for m in _models(engines) if m.info.tokenizer_digest == leading]
    fingerprints = sorted({model.fingerprint for model in models})
    if len(fingerprints) == 1:
        return models[0]
    return replace(models[0], fingerprint=_joint_fingerprint(fingerprints))


def warn_if_they_differ(name: str, engines: Sequence[EngineConnection]) -> None:
    infos = [model.info for model in _models(engines)]
    if len({info.tokenizer_digest for info in infos}) > 1:
        logger.warning(
            "the engines of %s have different tokenizers: only those with the one that most have "
            "get requests",
            name,
        )
    elif len({info.weights_digest for info in infos}) > 1:
        logger.warning("the engines of %s have different weights", name)


def _models(engines: Sequence[EngineConnection]) -> list[ServedModel]:
    return [engine.model for engine in engines if engine.model is not None]


def _joint_fingerprint(fingerprints: Sequence[str]) -> str:
    """Of several backends that may each answer: a seed yields what one of them makes of it."""
    return "fp_" + hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()[:12]
