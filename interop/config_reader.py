"""Values of the right type out of a file of others, or one line that says which key is wrong."""

from __future__ import annotations

import json
import math
from typing import Any

from ..errors import UserError

_MOST = 2**31 - 1  # of a whole number; what exceeds it is damage


class ConfigReader:
    """Reads the keys of a config.json, or of a GGUF file."""

    def __init__(self, values: dict[str, Any], where: str):
        self.values, self.where = values, where

    def value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def number(self, key: str, *, default: int | None = None) -> int:
        value = self.value(key, default)
        if type(value) is not int or not 0 < value <= _MOST:
            raise self.wrong(key, value, "a positive whole number")
        return value

    def real(self, key: str, *, default: float | None = None) -> float:
        value = self.value(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.value(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def only(self, key: str, default: Any, *supported: Any) -> None:
        """Raises unless the key has a value that our models compute."""
        value = self.value(key, default)
        if value not in supported:
            raise UserError(
                f"{self.where}: {key}={value!r} is not supported, only {supported[0]!r}: this "
                "model cannot be converted"
            )

    def wrong(self, key: str, value: object, what: str) -> UserError:
        if value is None:
            return UserError(f"{self.where} lacks {key}: the file is damaged or too old")
        return UserError(f"{self.where}: {key}={value!r} should be {what}")


def parse_object(text: str | bytes) -> dict[str, Any]:
    """A JSON object; ValueError if it is none, or names a key twice."""
    try:
        value = json.loads(text, object_pairs_hook=_without_repetition)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names {repeated!r} twice")
    return values
