"""A config.json with typed look-ups, whose every complaint names the file and the key. Used by `config` and `rope`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl_batch.errors import ModelError

MAX_COUNT = 1 << 24  # no size of a model comes near; larger values are mistakes
MAX_NUMBER = 1e30


@dataclass(frozen=True)
class ConfigFile:
    """An object of a JSON file.

    Attributes:
        path: the file, for messages.
        data: the object.
        prefix: how messages name the object, when it isn't the file's outermost: "rope_scaling.".
    """

    path: Path
    data: dict[str, Any]
    prefix: str = ""

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Raises ModelError if the file can't be read or holds no JSON object."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"can't read {path}: {error}") from error
        if not isinstance(data, dict):
            raise ModelError(f"{path} must hold a JSON object, not {type(data).__name__}")
        return cls(path, data)

    def error(self, key: str, message: str) -> ModelError:
        """The error to raise about `key`."""
        return ModelError(f"{self.path}: {self.prefix}{key}: {message}")

    def child(self, key: str) -> ConfigFile | None:
        """The object under `key`; None if there is none or it is empty."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, f"must be an object, got {value!r}")
        return ConfigFile(self.path, value, f"{self.prefix}{key}.") if value else None

    def either(self, new: str, old: str) -> str:
        """The spelling of a renamed key that this file uses."""
        return new if self.data.get(new) is not None or self.data.get(old) is None else old

    def count(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_COUNT) -> int:
        """A whole number in [low, high]; without a default the key must be there."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"must be a whole number between {low} and {high}, got {_shown(value)}")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0, high: float = MAX_NUMBER) -> float:
        """A number in [low, high]; without a default the key must be there."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(key, f"must be a number between {low:g} and {high:g}, got {_shown(value)}")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers greater than 0; it must be there."""
        values = self._get(key, None)
        if not isinstance(values, list) or not all(isinstance(v, int | float) and 0 < v <= MAX_NUMBER for v in values):
            raise self.error(key, f"must be a list of numbers greater than 0, got {values!r}")
        return tuple(map(float, values))

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r}")
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        value = self._get(key, default)
        if value not in choices:
            raise self.error(key, f"{value!r} isn't supported; supported are {', '.join(choices)}")
        return str(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.data.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.error(key, "is missing, and has no default")
        return default


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
