"""What a run shows while it trains: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_SECONDS = 10.0  # least time between lines when the output is not a terminal


class Display:
    """Progress of training on standard output. Use as a context manager.

    On a terminal a bar is redrawn in place. Elsewhere a line is printed at most every ten seconds,
    without control characters, so that a log file stays readable.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        console: Console | None = None,
        shown: bool = True,
    ):
        """shown: False for all processes of a run but one."""
        self._console = console or Console(
            highlight=False, soft_wrap=True, markup=False, quiet=not shown
        )
        self._total, self._first = total_steps, first_step
        self._started = self._last_line = time.monotonic()
        self._shown = first_step
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=self._console,
            disable=not (self._console.is_terminal and shown),
        )
        self._task = self._progress.add_task("compiling", total=total_steps, completed=first_step)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """Prints a line that stays."""
        self._console.print(text)

    def update(self, row: dict[str, Any]) -> None:
        """Shows a finished step: a training row of `metrics.py`."""
        step = row["step"]
        text = (
            f"loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tokens/s"
            f"  loss scale {row['loss_scale']:g}"
        )
        if self._console.is_terminal:
            self._progress.update(self._task, completed=step, description=text)
            return
        now = time.monotonic()
        is_first, is_last = self._shown == self._first, step == self._total
        if now - self._last_line < _PLAIN_SECONDS and not (is_first or is_last):
            return
        self._last_line, self._shown = now, step
        per_step = (now - self._started) / max(step - self._first, 1)
        left = duration(per_step * (self._total - step))
        self.note(f"step {step}/{self._total}  {text}  {left} left")


def duration(seconds: float) -> str:
    """Such as 0:07, 12:30 or 3:05:00."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
