"""What `data.path` names: files, the standard library, or a prepared folder."""

from pathlib import Path

from ..errors import UserError
from .config import DataConfig
from .documents import Source
from .files import FileSource
from .manifest import MANIFEST_FILE
from .standard_library import StandardLibrarySource

PLAN_FILE = "plan.json"  # of a folder that prepare.py is writing or has written


def open_source(config: DataConfig) -> Source:
    """The documents that `config.path` names; None is the standard library.

    Raises:
      UserError: nothing there or not readable.
    """
    if config.path is None:
        for key in ("format", "field"):
            if getattr(config, key) != getattr(DataConfig, key):
                raise UserError(
                    f"data.{key}={getattr(config, key)} without data.path: the standard library "
                    "is plain text; set data.path to your records"
                )
        return StandardLibrarySource()
    return FileSource(
        config.path,
        field=config.field,
        record_format=config.format,
        on_bad_record=config.on_bad_record,
        cache_dir=config.cache_dir,
    )


def prepared_folder(path: str | None) -> Path | None:
    """The folder, if `path` is one that `python -m fp4zoo.data.prepare` wrote.

    Raises:
      UserError: it is one, but unfinished.
    """
    if path is None:
        return None
    folder = Path(path).expanduser()
    if (folder / MANIFEST_FILE).is_file() and (folder / PLAN_FILE).is_file():
        return folder
    if (folder / PLAN_FILE).is_file():
        raise UserError(
            f"{path} is an unfinished prepared folder: give the same "
            "`python -m fp4zoo.data.prepare` command again to finish it"
        )
    return None
