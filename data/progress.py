"""Progress of long work on standard error: a moving bar on a terminal, closing lines anywhere."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ..errors import printable


def note(message: str) -> None:
    """Prints one unadorned line on standard error, of the first of several processes only."""
    if _process_index() > 0:
        return
    line = printable(message)  # names of files may hold anything
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(line)


@contextlib.contextmanager
def byte_progress(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yields `advance(num_bytes)`. The bar disappears at the end; `note` what was done."""
    console = Console(stderr=True)
    shown = console.is_terminal and _process_index() == 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task(description, total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)


def _process_index() -> int:
    """This process's number among those of `jax.distributed`, which it does not start."""
    jax = sys.modules.get("jax")
    return jax.process_index() if jax is not None and jax.distributed.is_initialized() else 0
