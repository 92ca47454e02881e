"""Follows the steps of a run: rows of metrics, the display, and the alarms.

The loop hands over the metrics of step k - 1 while step k computes, so that reading them never
leaves the device idle.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .display import Display
from .errors import TrainingFailure
from .metrics import MetricsWriter

_SHOWN_NAMES = 6


@dataclass(frozen=True)
class RecorderConfig:
    """What does not change during a run.

    Attributes:
      log_every: steps between rows of metrics.
      max_steps: of the run; the last one always gets a row.
      max_consecutive_skips: non-finite steps in a row after which the run has failed.
      gradient_names: names of the entries of the metric gradient_squares.
      tokens_per_step: of a whole batch.
      flops_per_step: over all devices.
      peak_flops: of all devices together, None when unknown.
    """

    log_every: int
    max_steps: int
    max_consecutive_skips: int
    gradient_names: list[str]
    tokens_per_step: int
    flops_per_step: float
    peak_flops: float | None


class Recorder:
    """Takes each step's metrics once, in order."""

    def __init__(self, config: RecorderConfig, writer: MetricsWriter, display: Display):
        self._config, self._writer, self._display = config, writer, display
        self._has_reported_nothing = False  # a step without a trained token
        self._silent: set[str] = set()  # parameters whose all-zero gradients have been reported
        self._start_window()

    def record(self, step: int, metrics: dict[str, jax.Array], data_seconds: float) -> int:
        """Waits for the metrics of a step, shows them and writes them when their turn has come.

        data_seconds: time that the loop waited for the step's batch.

        Returns:
          Number of non-finite steps in a row, this one the last; 0 for a finite step.

        Raises:
          TrainingFailure: when there have been too many of those.
        """
        values = jax.device_get(metrics)
        self._steps += 1
        self._data_seconds += data_seconds
        row = self._row(step, values)
        self._display.update(row)
        consecutive = int(values["consecutive_skips"])
        if consecutive:
            self._report_skip(step, values, consecutive)
        elif values["tokens"] > 0:
            self._report_zero_gradients(step, values["gradient_squares"])
        else:
            self._report_nothing_to_learn(step)
        if step % self._config.log_every == 0 or step == self._config.max_steps:
            self._writer.write(row)
            self._start_window()
        if consecutive >= self._config.max_consecutive_skips:
            raise TrainingFailure(
                f"{consecutive} steps in a row were not finite, up to step {step}; not finite were "
                f"{self._non_finite(values)}. The parameters are those before these steps. Lower "
                "optimizer.learning_rate, or look at the data of these steps"
            )
        return consecutive

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Keeps the time of what is inside out of tokens_per_second."""
        begin = time.perf_counter()
        yield
        self._window_start += time.perf_counter() - begin

    def _start_window(self) -> None:
        self._window_start = time.perf_counter()
        self._steps, self._data_seconds = 0, 0.0

    def _row(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        config = self._config
        seconds = max(time.perf_counter() - self._window_start, 1e-9)
        row: dict[str, Any] = {"step": step}
        for name in ("loss", "gradient_norm", "learning_rate", "loss_scale"):
            row[name] = float(values[name])
        row["skipped_steps"] = int(values["skipped_steps"])
        row["tokens_per_second"] = self._steps * config.tokens_per_step / seconds
        row["data_wait"] = self._data_seconds / seconds
        if config.peak_flops:
            row["mfu"] = self._steps * config.flops_per_step / seconds / config.peak_flops
        known = row.keys() | {"tokens", "finite", "consecutive_skips", "gradient_squares"}
        row.update({name: float(value) for name, value in values.items() if name not in known})
        return row

    def _report_skip(self, step: int, values: dict[str, Any], consecutive: int) -> None:
        self._display.note(
            f"step {step} skipped ({consecutive} in a row): not finite were "
            f"{self._non_finite(values)}; loss scale was {float(values['loss_scale']):g}"
        )

    def _non_finite(self, values: dict[str, Any]) -> str:
        wrong = [] if np.isfinite(values["loss"]) else ["the loss"]
        squares = np.asarray(values["gradient_squares"])
        where = np.flatnonzero(~np.isfinite(squares))
        names = [self._config.gradient_names[index] for index in where]
        if names:
            wrong.append(f"the gradients of {_some(names)} ({len(names)} of {squares.size})")
        elif not wrong:
            wrong.append("an auxiliary loss or the gradients' norm")
        return " and ".join(wrong)

    def _report_nothing_to_learn(self, step: int) -> None:
        if not self._has_reported_nothing:
            self._has_reported_nothing = True
            self._display.note(
                f"alarm: no token of step {step} is trained on: prompts longer than "
                "sequence_length leave rows without an answer; raise it, or data.packing=best_fit"
            )

    def _report_zero_gradients(self, step: int, squares: np.ndarray) -> None:
        names = [self._config.gradient_names[index] for index in np.flatnonzero(squares == 0)]
        new = [name for name in names if name not in self._silent]
        if new:
            self._silent.update(new)
            self._display.note(
                f"alarm: at step {step} the gradients of {_some(new)} are all zero ({len(new)} of "
                f"{squares.size}): these do not learn"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more
