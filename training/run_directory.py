"""One run, one folder."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from ..errors import UserError
from .checkpoints import FOLDER
from .metrics import METRICS_FILE, TENSORBOARD_FOLDER, write_atomically

if TYPE_CHECKING:
    from ..configs.schema import TrainConfig

CONFIG_FILE = "config.yaml"


def prepare_run_directory(config: TrainConfig) -> Path:
    """Creates the run's folder, `output_dir` or a new one under runs/, and returns it.

    What is in the folder stays as it is until the run begins; only with resume=false what an
    earlier run left there is moved to previous-N/, never deleted.

    Raises:
      UserError: if the folder cannot be made or written to.
    """
    if config.output_dir is None:
        name = f"{config.model.architecture}-{config.precision.recipe}"
        directory = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    else:
        directory = Path(config.output_dir).expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not config.resume:
            _set_aside(directory)
        write_atomically(directory / ".writable", "")
        (directory / ".writable").unlink()
    except OSError as error:
        raise UserError(
            f"output_dir={directory} cannot be written to ({error.strerror}): choose another folder"
        ) from error
    return directory


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
