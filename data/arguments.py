"""Settings on the command lines of this package, written as train.py's: data.key=value."""

import dataclasses
from collections.abc import Sequence
from typing import Any, get_type_hints

import yaml

from ..errors import UserError, did_you_mean
from .config import DataConfig


def config_from_arguments(arguments: Sequence[str]) -> DataConfig:
    """The configuration of `data.key=value` arguments, each value in YAML.

    Raises:
      UserError: one line that names the argument.
    """
    types = get_type_hints(DataConfig)
    names = [f"data.{field.name}" for field in dataclasses.fields(DataConfig)]
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise UserError(f"{argument}: write key=value, such as data.path=FILE")
        if key == "data":
            raise UserError(f"{argument}: this command takes no groups: write data.format={text}")
        if key not in names:
            raise UserError(f"unknown key {key!r}{did_you_mean(key, names)}")
        name = key.removeprefix("data.")
        values[name] = _value(key, text, types[name])
    return DataConfig(**values)


def _value(key: str, text: str, kind: Any) -> Any:
    if kind in (str, str | None) and text[:1] not in ("'", '"'):
        return None if text == "null" and kind is not str else text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{key}={text}: expected a value as YAML writes it") from error
