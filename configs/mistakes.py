"""What Hydra and OmegaConf raise, said in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import yaml
from hydra.errors import HydraException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)

from ..errors import UserError, near_match
from .fields import Key, keys


class MissingValue(Exception):
    """Raised by `${required:}`, which a YAML file writes where the user has to give a value.

    OmegaConf's own ??? does not do: over a key that has a default it silently leaves the default.
    """


@contextmanager
def in_one_line(schema: type) -> Iterator[None]:
    """Turns what Hydra, OmegaConf and YAML raise inside the block into `UserError`."""
    try:
        yield
    except UserError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{mark.name}:{mark.line + 1}: " if mark else ""
        raise UserError(f"{where}{error.problem}") from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(_in_words(error, keys(schema))) from error
    except OSError as error:  # a file of the user's that cannot be read; after Hydra's OSErrors
        raise UserError(f"{error.filename}: {error.strerror}") from error


def unknown_key(path: str, known: Mapping[str, Key]) -> str:
    """Returns the message for a key not in the schema: the near match, or the keys beside."""
    message = f"unknown key {path!r}"
    match = _nearest(path, known)
    if match:
        return f"{message}: did you mean {match!r}?"
    parent = path.rpartition(".")[0]
    while parent and parent not in known:
        parent = parent.rpartition(".")[0]
    beside = [name for name in known if name.rpartition(".")[0] == parent]
    if parent and beside:
        return f"{message}: {parent} has {', '.join(name.rpartition('.')[2] for name in beside)}"
    if parent:
        return f"{message}: {parent} is {known[parent].expected}, not a group of keys"
    return f"{message}: --help lists the keys"


def wrong_type(path: str, value: object, known: Mapping[str, Key]) -> str:
    """Returns the message for a value that is not of its key's type."""
    return f"{path}={as_written(value)}: expected {known[path].expected}"


def _nearest(path: str, known: Mapping[str, Key]) -> str | None:
    """The key meant by `path`: the same name elsewhere, or the likest beside it, or elsewhere."""
    parent, _, name = path.rpartition(".")
    same_name = [other for other in known if other.rpartition(".")[2] == name]
    if same_name:
        return near_match(path, same_name) or same_name[0]
    if parent == "" or parent in known:
        beside = {
            other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == parent
        }
        likest = near_match(name, beside)
        if likest:
            return beside[likest]
    else:
        likest = near_match(path, known)
        if likest:
            return likest
    if parent == "":
        anywhere = {other.rpartition(".")[2]: other for other in known}
        likest = near_match(name, anywhere, cutoff=0.8)  # among so many a chance match is likely
        if likest:
            return anywhere[likest]
    return None


def _in_words(error: Exception, known: Mapping[str, Key]) -> str:
    """The innermost OmegaConf error with its key, or else the first line of what Hydra said."""
    where = ""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        words = str(cause).split("'")
        if words[0] == "In " and not where:  # Hydra: In 'model/mine': ...
            where = f"in {words[1]}.yaml: "
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return " ".join(str(error).strip().split("\n")[0].split())
    path = cause.full_key or ""
    if isinstance(cause, InterpolationResolutionError) and MissingValue.__name__ in str(cause):
        return f"missing value: set {path} ({known[path].expected.removesuffix(' or null')})"
    if path.startswith("hydra."):
        return f"unknown key {path!r}: --cfg hydra lists Hydra's own keys"
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and path not in known:
        return where + unknown_key(path, known)
    if isinstance(cause, ValidationError) and path in known:
        return where + wrong_type(path, cause.value, known)
    message = " ".join((cause.msg or str(cause)).split("\n")[0].split())
    return f"{where}{path}: {message}" if path else where + message


def as_written(value: object) -> str:
    """Returns a value as YAML writes it."""
    value = list(value) if isinstance(value, tuple) else value
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
