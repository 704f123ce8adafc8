"""Why a model cannot be served: the one error of model store, import and loading by name."""

from __future__ import annotations


class ModelError(Exception):
    """The message is a full sentence for the person at the command line."""
