"""What a run records: `metrics.jsonl`, one object a line, and the same numbers for TensorBoard.

Training rows have step, loss, gradient_norm, learning_rate, loss_scale, skipped_steps,
tokens_per_second, data_wait (share of the time spent waiting for data) and, where the device's
peak is known, mfu; evaluation rows have step, validation_loss (nats per token) and bits_per_byte.
A number that is not finite is null, as JSON has no other way to say it.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class MetricsWriter:
    """Appends rows to `metrics.jsonl`, flushed by the time `write` returns, and to TensorBoard."""

    def __init__(self, run_directory: Path | None, *, resume_step: int):
        """run_directory: None writes nothing, for all processes but one.

        resume_step: last step whose rows are kept; those of later steps, which are going to be
        run again, are dropped. 0 for a new run."""
        self._file = None
        if run_directory is None:
            return
        from tensorboardX import SummaryWriter

        self.path = run_directory / METRICS_FILE
        keep_rows(self.path, resume_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(
            str(run_directory / TENSORBOARD_FOLDER),
            purge_step=resume_step + 1 if resume_step else None,
            flush_secs=10,
        )

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()
            self._tensorboard.close()

    def write(self, row: dict[str, Any]) -> None:
        """Writes one row; `row` has "step" and plain numbers."""
        if self._file is None:
            return
        clean = {name: _finite(value) for name, value in row.items()}
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()
        group = "validation" if "validation_loss" in row else "training"
        for name, value in clean.items():
            if name != "step" and value is not None:
                self._tensorboard.add_scalar(f"{group}/{name}", value, row["step"])


def keep_rows(path: Path, last_step: int) -> None:
    """Drops the rows after `last_step`, and a last line that a killed run left unfinished."""
    if not path.exists():
        return
    text = path.read_bytes().decode("utf-8", errors="replace")
    kept = [line for line in text.splitlines() if _step(line) <= last_step]
    write_atomically(path, "".join(line + "\n" for line in kept))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file by a complete one, so that no reader and no crash sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
