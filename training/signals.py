"""Stopping cleanly on SIGTERM and SIGINT.

The first signal asks the loop to stop after the step that is running: it saves a checkpoint and
leaves. A second SIGINT aborts at once, as Ctrl-C does elsewhere; the newest complete checkpoint
remains.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Context manager that catches SIGTERM and SIGINT; does nothing outside the main thread.

    Attributes:
      signal: the signal that was received, or None.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
