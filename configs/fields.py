"""What a configuration dataclass says about itself: its keys, their types, defaults and meanings.

Everything else in this package is derived from these: the schema that Hydra checks against, the
near matches of error messages, and docs/configuration.md. A class describes its keys in an
`Attributes:` section of its docstring.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from ..errors import UserError, check_choice

_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Key:
    """One key of a configuration.

    Attributes:
      path: dotted path from the root, such as "optimizer.learning_rate".
      annotation: the field's type, with None stripped.
      optional: whether null is allowed.
      default: the schema's default; `dataclasses.MISSING` when there is none.
      meaning: the entry in its class's docstring.
      group: the nested dataclass when the key is a group of keys, else None.
    """

    path: str
    annotation: Any
    optional: bool
    default: Any
    meaning: str
    group: type | None

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a `Literal`, empty for every other type."""
        return typing.get_args(self.annotation) if _is_literal(self.annotation) else ()

    @property
    def expected(self) -> str:
        """The type in words, for error messages."""
        return type_in_words(self.annotation) + (" or null" if self.optional else "")

    def accepts(self, value: Any) -> bool:
        """Whether a value from the command line has the key's type; interpolations may."""
        if value is None:
            return self.optional
        if isinstance(value, str) and "${" in value:
            return True
        if self.group is not None:
            return isinstance(value, dict)
        if typing.get_origin(self.annotation) in (list, tuple):
            return isinstance(value, list)
        if self.annotation is float:
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        if self.annotation is int:
            return isinstance(value, int) and not isinstance(value, bool)
        if self.annotation is bool:
            return isinstance(value, bool)
        return not isinstance(value, (list, dict))


def type_in_words(annotation: Any) -> str:
    """Returns a type as a user would say it: `an integer`, `a list of text`."""
    if dataclasses.is_dataclass(annotation):
        return "a group of keys"
    if _is_literal(annotation):
        return "one of " + ", ".join(typing.get_args(annotation))
    if typing.get_origin(annotation) in (list, tuple):
        item = type_in_words(typing.get_args(annotation)[0])
        return "a list, each " + item
    return _TYPE_NAMES[annotation]


def keys(schema: type) -> dict[str, Key]:
    """Returns every key of a schema by its path: leaves and groups, groups before their leaves."""
    return {key.path: key for key in _walk(schema, "")}


def leaves(schema: type) -> dict[str, Key]:
    """Returns the keys that hold a value themselves."""
    return {path: key for path, key in keys(schema).items() if key.group is None}


def values(config: Any) -> dict[str, Any]:
    """Returns the value of every key of a configuration by its path; groups that are null too."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= {f"{field.name}.{path}": leaf for path, leaf in values(value).items()}
        elif isinstance(value, (list, tuple)):
            found[field.name] = [
                dataclasses.asdict(item) if dataclasses.is_dataclass(item) else item  # pyright: ignore
                for item in value
            ]
        else:
            found[field.name] = value
    return found


def _walk(schema: type, prefix: str) -> Iterator[Key]:
    meanings = describe(schema)
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        annotation, optional = _strip_none(hints[field.name])
        group = annotation if dataclasses.is_dataclass(annotation) else None
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        path = prefix + field.name
        yield Key(path, annotation, optional, default, meanings.get(field.name, ""), group)  # pyright: ignore
        if group is not None:
            yield from _walk(group, path + ".")  # pyright: ignore


@functools.cache
def describe(schema: type) -> Mapping[str, str]:
    """Returns what a class's docstring, and those of its bases, say about each field, a line each.

    An entry is `name: text` or `name, name: text`, its further lines indented deeper.
    """
    names = {field.name for field in dataclasses.fields(schema)}
    meanings: dict[str, str] = {}
    for base in schema.__bases__:
        if dataclasses.is_dataclass(base):
            meanings.update(describe(base))
    current: list[str] = []
    depth = 0
    for line in inspect.cleandoc(schema.__doc__ or "").splitlines():
        indent = len(line) - len(line.lstrip())
        entry = re.match(r"(\w+(?:, \w+)*): +(.*)", line.strip())
        if entry and names.issuperset(entry[1].split(", ")):
            current, depth = entry[1].split(", "), indent
            meanings.update(dict.fromkeys(current, entry[2]))
        elif line.strip() and indent > depth:
            for name in current:
                meanings[name] += " " + line.strip()
        else:
            current = []
    return meanings


@functools.cache
def mutable_twin(schema: type) -> type:
    """Returns a dataclass with the schema's fields for OmegaConf to fill in.

    OmegaConf makes nodes of frozen classes read-only, checks `Literal` not at all and runs no
    `__post_init__` until the end; the twin is mutable, has str for `Literal` and validates nothing.
    `build` makes the real object.
    """
    hints = typing.get_type_hints(schema)
    fields = []
    for field in dataclasses.fields(schema):
        annotation, optional = _strip_none(hints[field.name])
        annotation = _twin_annotation(annotation)
        if field.default_factory is not MISSING:
            default = dataclasses.field(default_factory=_twin_default(field.default_factory))
        elif field.default is not MISSING:
            default = dataclasses.field(
                default_factory=_twin_default(lambda value=field.default: value)
            )
        else:
            default = dataclasses.field()
        optional = optional and annotation is not Any
        fields.append((field.name, annotation | None if optional else annotation, default))
    return dataclasses.make_dataclass(schema.__name__, fields, kw_only=True)


def _twin_annotation(annotation: Any) -> Any:
    if dataclasses.is_dataclass(annotation):
        return mutable_twin(annotation)  # pyright: ignore
    if typing.get_origin(annotation) in (list, tuple):
        if dataclasses.is_dataclass(typing.get_args(annotation)[0]):
            return Any  # the class that has the list checks and makes it, with better messages
    return str if _is_literal(annotation) else annotation


def _twin_default(make: Any) -> Any:
    def default() -> Any:
        value = make()
        if not dataclasses.is_dataclass(value):
            return value
        twin = mutable_twin(type(value))  # pyright: ignore
        return twin(
            **{
                f.name: _twin_default(lambda f=f: getattr(value, f.name))()
                for f in dataclasses.fields(value)
            }
        )

    return default


def build(schema: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Makes the dataclass from nested plain values that OmegaConf has checked against the twin.

    Raises:
      UserError: a value outside its choices, or what the class's own `__post_init__` objects to.
    """
    arguments = {}
    for key in _walk(schema, ""):
        if "." in key.path:
            continue
        value = values[key.path]
        if value is None:
            pass
        elif key.group is not None:
            value = build(key.group, value, f"{prefix}{key.path}.")
        elif key.choices:
            check_choice(prefix + key.path, value, key.choices)
        elif typing.get_origin(key.annotation) is tuple:
            value = tuple(value)
        arguments[key.path] = value
    try:
        return schema(**arguments)
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from error


def _is_literal(annotation: Any) -> bool:
    return typing.get_origin(annotation) is typing.Literal


def _strip_none(annotation: Any) -> tuple[Any, bool]:
    """Returns the annotation without None, and whether None was in it."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation, False
    rest = [argument for argument in typing.get_args(annotation) if argument is not type(None)]
    assert len(rest) == 1, f"a configuration key has one type, not {annotation}"
    return rest[0], True
