"""One run, one folder."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from ..errors import UserError
from .checkpoints import FOLDER
from .metrics import METRICS_FILE, TENSORBOARD_FOLDER, write_atomically

if TYPE_CHECKING:
    from ..configs.schema import TrainConfig

CONFIG_FILE = "config.yaml"


def choose_run_directory(config: TrainConfig) -> Path:
    """The run's folder: `output_dir`, or a new one under runs/; not created here."""
    if config.output_dir is not None:
        return Path(config.output_dir).expanduser()
    name = f"{config.model.architecture}-{config.precision.recipe}"
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


@contextlib.contextmanager
def prepared_run_directory(directory: Path, *, resume: bool) -> Iterator[None]:
    """Creates the run's folder; when the block fails, removes what nothing has been written to.

    What is in the folder stays as it is until the run begins; only with resume=False what an
    earlier run left there is moved to previous-N/, never deleted.

    Raises:
      UserError: if the folder cannot be made or written to, or holds something that is not a run's.
    """
    checkpoints = directory / FOLDER
    made = [path for path in (checkpoints, directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not resume:
            _set_aside(directory)
        write_atomically(directory / ".writable", "")
        (directory / ".writable").unlink()
    except OSError as error:
        raise UserError(
            f"output_dir={directory} cannot be written to ({error.strerror}): choose another folder"
        ) from error
    if checkpoints.exists() and not checkpoints.is_dir():
        raise UserError(
            f"{checkpoints} is a file, and checkpoints go into a folder of that name: move it "
            "away, or choose another output_dir"
        )
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not empty: something has been written
            for path in filter(Path.is_dir, made):
                path.rmdir()
        raise


def write_config(directory: Path, config: TrainConfig) -> None:
    """Writes config.yaml, complete or not at all."""
    text = OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))
    write_atomically(directory / CONFIG_FILE, text)


def _set_aside(directory: Path) -> None:
    names = (FOLDER, METRICS_FILE, TENSORBOARD_FOLDER, CONFIG_FILE)
    left = [directory / name for name in names if (directory / name).exists()]
    if left:
        number = 1
        while (aside := directory / f"previous-{number}").exists():
            number += 1
        aside.mkdir()
        for path in left:
            path.rename(aside / path.name)
