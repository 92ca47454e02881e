"""The cache directory: entries appear whole or not at all, and are never changed afterwards.

An entry is a directory named by a hash of everything that determines its content. It is written
under a temporary name beside its final place and renamed, so that a crash leaves no half entry and
two processes that build the same entry at once both succeed: the slower one drops its copy.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError

_ABANDONED_SECONDS = 24 * 3600.0
_REMEDY = "set FP4ZOO_CACHE or data.cache_dir to a directory with room"


def cache_directory(cache_dir: str | None = None) -> Path:
    """The configured directory, else $FP4ZOO_CACHE, else ~/.cache/fp4zoo (not created here).

    Raises:
      UserError: there is no such home directory.
    """
    directory = cache_dir or os.environ.get("FP4ZOO_CACHE") or "~/.cache/fp4zoo"
    try:
        return Path(directory).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"the data cache {directory} is in a home directory that is not there: set "
            "FP4ZOO_CACHE or data.cache_dir to a directory"
        ) from error


def hash_of(**parts: Any) -> str:
    """A 24-digit hexadecimal hash of JSON-able keyword arguments."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


@contextlib.contextmanager
def publish(entry: Path, *, remedy: str = _REMEDY) -> Iterator[Path]:
    """Yields an empty directory that becomes `entry` when the block ends without an error.

    If another process published `entry` meanwhile, that one stays: equal keys mean equal content.

    Raises:
      UserError: the directory cannot be written (read-only, full, no permission); `remedy` says
        what to do then.
    """
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(entry.parent)
        temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.partial-", dir=entry.parent))
    except OSError as error:
        raise not_writable(entry.parent, error, remedy) from error
    try:
        yield temporary
        try:
            temporary.rename(entry)
        except OSError:
            if not entry.is_dir():
                raise
    except OSError as error:
        if error.filename is None or str(error.filename).startswith(str(entry.parent)):
            raise not_writable(entry.parent, error, remedy) from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def discard(entry: Path) -> None:
    """Removes a damaged entry, so that it can be built again."""
    shutil.rmtree(entry, ignore_errors=True)


def _remove_abandoned(directory: Path) -> None:
    """Removes temporary directories that a killed process left behind a day ago or earlier."""
    for path in directory.glob("*.partial-*"):
        with contextlib.suppress(OSError):  # another process may be removing the same one
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def not_writable(directory: Path, error: OSError, remedy: str = _REMEDY) -> UserError:
    """The error for a directory that is read-only, full or not permitted."""
    return UserError(f"cannot write {directory} ({error.strerror or error}): {remedy}")
