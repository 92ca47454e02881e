"""Stopping on SIGTERM and SIGINT: at once before there is anything to save, cleanly afterwards.

While a run trains, the first signal asks the loop to stop after the step that is running: it saves
a checkpoint and leaves. A second SIGINT aborts at once, as Ctrl-C does elsewhere; the newest
complete checkpoint remains.

A program's abort (`abort_at_once`) does not wait for Python: a KeyboardInterrupt would come only
after a compilation of minutes, and is lost when it is raised inside a callback of JAX.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_running: list[StopRequest] = []  # the run that takes signals now
_watched = False  # whether a thread waits for signals


class StopRequest:
    """Context manager that catches SIGTERM and SIGINT; does nothing outside the main thread.

    Attributes:
      signal: the signal that was received, here or in another process, or None.
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
            _running.append(self)
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self in _running:
            _running.remove(self)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


def abort_at_once() -> None:
    """From now on, a SIGINT that no running `StopRequest` takes as its first signal ends this
    process within moments: "aborted", status 130.

    For programs, not for somebody's notebook; does nothing outside the main thread.
    """
    global _watched
    if _watched or threading.current_thread() is not threading.main_thread():
        return
    _watched = True
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    # The system writes each signal's number into the pipe, whatever the main thread is busy with.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()


def _watch(reader: int) -> None:
    counted, count = None, 0  # signals that the run of now has received
    while numbers := os.read(reader, 64):
        for number in numbers:
            run = _running[-1] if _running else None
            if run is not counted:
                counted, count = run, 0
            if number == signal.SIGINT and (run is None or count > 0):
                _abort()
            count += number in (signal.SIGINT, signal.SIGTERM)


def _abort() -> None:
    if os.isatty(1):
        os.write(1, b"\x1b[?25h")  # the cursor, which a progress bar had hidden
    os.write(2, b"aborted\n")
    os._exit(130)
