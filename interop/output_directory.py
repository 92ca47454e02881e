"""A directory that appears complete or not at all, and how far it is."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import UserError

_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EFBIG, errno.EIO,
                errno.ENAMETOOLONG)  # fmt: skip
Progress = Callable[[int], object]  # takes the bytes that were just done


@contextlib.contextmanager
def output_directory(path: Path, *, source: Path, needed_bytes: int) -> Iterator[Path]:
    """A folder to write into, which becomes `path` when the block ends without an exception.

    source: the folder or file that is read; `path` may not lie in it.

    It lies beside `path` under a hidden name. After an exception it is removed; one that a killed
    run left behind is removed by the next.

    Raises:
      UserError: `path` exists, lies in the source, cannot be written, another process is writing
        it, or the disk is too small or full.
    """
    path = path.expanduser().absolute()
    if os.path.lexists(path):
        raise UserError(f"{path} exists already: remove it or choose another folder")
    if not os.path.isdir(path.parent):
        raise UserError(f"{path.parent} does not exist: make that folder first")
    if source.is_dir() and path.parent.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{path} lies inside its source {source}: choose another folder")
    free = shutil.disk_usage(path.parent).free
    if needed_bytes > free:
        raise UserError(
            f"{path} needs {needed_bytes / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB free: "
            "make room or choose another disk"
        )
    work = path.parent / f".{path.name}.incomplete"
    lock_path = path.parent / f".{path.name}.lock"
    try:
        lock = os.open(lock_path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}): choose another folder"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{path} is being written by another process: wait for it") from error
        _remove(work)
        work.mkdir()
        try:
            yield work
            os.rename(work, path)
        except BaseException:
            _remove(work)
            raise
        finally:
            lock_path.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in _NOT_WRITTEN:
            raise UserError(
                f"{path} could not be written ({error.strerror}), nothing is left of it: make room "
                "or choose another disk"
            ) from error
        raise
    finally:
        os.close(lock)


def _remove(work: Path) -> None:
    if work.is_symlink() or work.is_file():
        work.unlink()
    elif work.exists():
        shutil.rmtree(work)


def begin(progress: Callable[[int], Progress] | None, total: int) -> Progress:
    """Starts a progress report of `total` bytes; without one, the bytes are told to nobody."""
    return (lambda nbytes: None) if progress is None else progress(total)


def copy_files(files: list[Path], folder: Path) -> None:
    """Copies files into a folder, which is made if there are any."""
    if files:
        folder.mkdir(exist_ok=True)
    for file in files:
        shutil.copyfile(file, folder / file.name)
