"""Progress of long work on standard error: a moving bar on a terminal, closing lines anywhere."""

import contextlib
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


def note(message: str) -> None:
    """Prints one unadorned line on standard error."""
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(message)


@contextlib.contextmanager
def byte_progress(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yields `advance(num_bytes)`. The bar disappears at the end; `note` what was done."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(description, total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)
