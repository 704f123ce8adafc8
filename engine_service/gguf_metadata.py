"""Typed reading of a GGUF file's key-value part; what is missing or malformed is a `ModelError`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader

from engine_service.model_error import ModelError


class GgufFile:
    """One opened GGUF file: metadata by key, tensors memory-mapped."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ModelError(f"There is no GGUF file at {path}.")
        try:
            self.reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError, MemoryError) as error:
            raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
        self.path = path

    def has(self, key: str) -> bool:
        return key in self.reader.fields

    def string(self, key: str) -> str:
        value = self._value(key)
        if not isinstance(value, str):
            raise self._malformed(key, "a string")
        return value

    def integer(self, key: str) -> int:
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._malformed(key, "an integer")
        return value

    def boolean(self, key: str) -> bool:
        value = self._value(key)
        if not isinstance(value, bool):
            raise self._malformed(key, "a boolean")
        return value

    def float32(self, key: str) -> float:
        """The shortest decimal that names the stored float32: 1e-05, not 9.999999747378752e-06."""
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._malformed(key, "a number")
        return float(str(np.float32(value)))

    def strings(self, key: str) -> list[str]:
        value = self._value(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._malformed(key, "a list of strings")
        return value

    def integers(self, key: str) -> list[int]:
        value = self._value(key)
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self._malformed(key, "a list of integers")
        return value

    def _value(self, key: str) -> object:
        field = self.reader.fields.get(key)
        if field is None:
            raise ModelError(f"{self.path.name} lacks the metadata key {key}.")
        value: object = field.contents()
        return value

    def _malformed(self, key: str, expected: str) -> ModelError:
        return ModelError(f"{self.path.name}: the metadata key {key} is not {expected}.")
