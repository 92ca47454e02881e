"""The embedded default corpus: the source text of this Python's standard library.

Every installation has it, it is real and tens of megabytes, and it needs no network. Files that a
tool wrote (tables of encodings, the pydoc topics, this build's configuration) are left out, as is
what is not UTF-8 text; both are counted.
"""

import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError
from .cache import hash_of
from .documents import Document, ReadReport, Unit

_OTHER_PEOPLES = ("site-packages", "dist-packages", "__pycache__")
_GENERATED = re.compile(
    rb"^#.*(auto-?\s?generated|generated (by|from|and used)|do not edit)|generated .*gencodec\.py",
    re.IGNORECASE | re.MULTILINE,
)
_HEADER_BYTES = 600


class StandardLibrarySource:
    """One document per `.py` file of the standard library, in the order of their paths."""

    def __init__(self, root: str | Path | None = None):
        """Lists the files under `root` (None: where this interpreter keeps its library).

        Raises:
          UserError: this Python has no library source (a zip or bytecode-only distribution).
        """
        self._root = Path(root or sysconfig.get_paths()["stdlib"])
        self._files = _list_sources(self._root)
        if not self._files:
            raise UserError(
                f"no standard library source in {self._root}: set data.path to a text file"
            )
        self._status = [file.stat() for file in self._files]
        self.total_bytes = sum(status.st_size for status in self._status)
        self.description = f"the standard library of Python {platform.python_version()}"

    def fingerprint(self) -> str:
        """Covers the Python version and every file's name, size and modification time."""
        files = [
            (str(file), status.st_size, status.st_mtime_ns)
            for file, status in zip(self._files, self._status, strict=True)
        ]
        return hash_of(kind="standard library", version=platform.python_version(), files=files)

    def documents(self, report: ReadReport) -> Iterator[Document]:
        """Yields one document per file; generated and undecodable ones are counted in `report`.

        Raises:
          UserError: a file cannot be read.
        """
        yield from self.read(self.units(self.total_bytes)[0], report)

    def units(self, unit_bytes: int) -> list[Unit]:
        """One: all of it is read in a second."""
        return [Unit(0, 0, None, 1, self.total_bytes)]

    def read(self, unit: Unit, report: ReadReport) -> Iterator[Document]:
        """As `documents`."""
        for file in self._files:
            name = file.relative_to(self._root).as_posix()
            try:
                content = file.read_bytes()
            except OSError as error:
                raise UserError(
                    f"cannot read {file} ({error.strerror}): correct the permissions or set "
                    "data.path to a text file"
                ) from error
            if _GENERATED.search(content[:_HEADER_BYTES]):
                report.drop("generated", name)
                continue
            try:
                yield Document(name, content.decode())
            except UnicodeDecodeError:
                report.drop("not UTF-8", name)


def _list_sources(root: Path) -> list[Path]:
    files = []
    for directory, directories, names in os.walk(root):
        directories[:] = [name for name in directories if name not in _OTHER_PEOPLES]
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    return sorted(files)
