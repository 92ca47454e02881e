"""A few threads that share the work of a conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

_WORKERS = 2  # one reads or writes while another computes; more only hold more memory
Job = TypeVar("Job")


def in_parallel(function: Callable[[Job], None], jobs: Iterable[Job]) -> None:
    """Runs the jobs in a few threads, never more of them begun than there are threads.

    The first exception of a job is raised, after those that are running have ended.
    """
    with ThreadPoolExecutor(_WORKERS) as pool:
        running: set[Future[None]] = set()
        for job in jobs:
            running.add(pool.submit(function, job))
            if len(running) == _WORKERS:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
        for future in running:
            future.result()
