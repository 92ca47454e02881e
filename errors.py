"""Errors that a user can act on, and the near matches that they offer.

A `UserError` carries one line: what was wrong, with its value, and what to do about it.
Command-line entry points print it as `error: ...` and exit with status 2; everything else that is
raised is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
import operator
import os
import sys
from collections.abc import Callable, Iterable, Sequence


def printable(text: str) -> str:
    """`text` on one line, with characters that would act on a terminal as Python writes them."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


class UserError(ValueError):
    """A mistake in a configuration, a file or an environment: one line, with the remedy.

    Names of files may hold anything: what is not printable in the message is escaped. `lines` are
    for what is no sentence, such as a table, and go below it.
    """

    def __init__(self, message: str, *, lines: Sequence[str] = ()):
        super().__init__(printable(str(message)))
        self.lines = tuple(lines)

    def __str__(self) -> str:
        return "\n".join([*self.args, *self.lines])


class SaidElsewhere(UserError):
    """A mistake that another process of the run prints: this one ends with the same status."""


class RunStopped(Exception):
    """A run that a signal ended early and well: all is saved, and nothing may start after it.

    signal: the signal's number.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.signal = number


def near_match(word: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the option most like `word`, or None when none is `cutoff` alike (0 to 1)."""
    matches = difflib.get_close_matches(
        str(word), [str(option) for option in options], n=1, cutoff=cutoff
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


def check_sizes(owner: str, **sizes: object) -> None:
    """Raises a `UserError` with `owner` and the value unless every size is a positive integer."""
    for name, value in sizes.items():
        try:
            valid = operator.index(value) > 0  # pyright: ignore[reportArgumentType]
        except TypeError:
            valid = False
        if not valid or isinstance(value, bool):
            raise UserError(f"{owner}: {name}={value!r} must be a positive integer")


def discard_output() -> None:
    """Sends the rest of stdout nowhere, so that what could not be printed does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_status(program: Callable[[], int]) -> int:
    """Runs `program` and returns its exit status: 2 after a `UserError`, 0 when who reads stdout
    has seen enough, 1 when it cannot be written, 130 after an interruption; one line on stderr."""
    try:
        status = program()
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head`
        discard_output()
        return 0
    except OSError as error:  # such as a full disk behind stdout
        discard_output()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
