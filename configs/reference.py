"""Writes docs/configuration.md: `python -m fp4zoo.configs.reference docs/configuration.md`."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from .fields import Key, keys
from .mistakes import as_written
from .schema import TrainConfig

_HEADER = """\
# Configuration

Every value of a run is a key below. `python train.py key=value ...` sets keys, `group=choice` takes
a file of `configs/<group>/`, `python train.py --cfg job ...` prints what a command line comes to.
A default in the tables is the schema's; a group's file may choose another.

Made from the dataclasses by `python -m fp4zoo.configs.reference docs/configuration.md`.
"""

# Docstrings speak of Python's values, the reference of YAML's.
_AS_YAML = {"None": "null", "True": "true", "False": "false"}
_PYTHON_WORD = re.compile(r"\b(?:None|True|False)\b")


def reference() -> str:
    """Returns docs/configuration.md."""
    known = keys(TrainConfig)
    sections = [_HEADER, "## Groups\n", *_group_rows()]
    groups = [path for path, key in known.items() if key.group is not None]
    for group in ["", *groups]:
        title = f"`{group}`" if group else "Top level"
        rows = [key for path, key in known.items() if path.rpartition(".")[0] == group]
        sections += [f"\n## {title}\n", "| key | value | default | meaning |", "|---|---|---|---|"]
        sections += [_row(key) for key in rows]
    return "\n".join(sections) + "\n"


def _group_rows() -> Iterator[str]:
    yield "| choice | what it is |"
    yield "|---|---|"
    assert __package__ is not None
    folder = resources.files(__package__)
    for group in dataclasses.fields(TrainConfig):
        files = folder / group.name
        if not files.is_dir():
            continue
        for file in sorted(files.iterdir(), key=lambda file: file.name):
            comment = file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
            yield f"| `{group.name}={file.name.removesuffix('.yaml')}` | {comment} |"


def _row(key: Key) -> str:
    if key.group is not None:
        default = "null" if key.default is None else "below"
    elif key.default is dataclasses.MISSING:
        default = "from the file"
    else:
        default = f"`{as_written(key.default)}`"
    meaning = _PYTHON_WORD.sub(lambda word: _AS_YAML[word[0]], key.meaning).replace("|", "\\|")
    return f"| `{key.path}` | {key.expected} | {default} | {meaning} |"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m fp4zoo.configs.reference docs/configuration.md")
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
