"""Errors that a user can act on, and the near matches that they offer.

A `UserError` carries one line: what was wrong, with its value, and what to do about it.
Command-line entry points print it as `error: ...` and exit with status 2; everything else that is
raised is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in a configuration, a file or an environment: one line, with the remedy."""


def near_match(word: str, options: Iterable[str]) -> str | None:
    """Returns the option most like `word`, or None when nothing is near."""
    matches = difflib.get_close_matches(
        str(word), [str(option) for option in options], n=1, cutoff=0.6
    )
    return matches[0] if matches else None


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Returns `: did you mean 'x'?`, or `: choose from a, b, c` when no option is near `word`."""
    options = [str(option) for option in options]
    match = near_match(word, options)
    return f": did you mean {match!r}?" if match else f": choose from {', '.join(options)}"


def check_choice(key: str, value: object, choices: Iterable[str]) -> None:
    """Raises a `UserError` with `key`, the value and the near match unless it is in `choices`."""
    choices = list(choices)
    if value not in choices:
        raise UserError(f"{key}={value}: unknown choice{did_you_mean(str(value), choices)}")
