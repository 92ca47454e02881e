"""Writing the shards of a prepared folder: one after the other, or by several processes."""

import concurrent.futures
import multiprocessing
import multiprocessing.connection
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from .cache import discard, publish
from .config import DataConfig
from .corpus import available_cpus, prepared_tokenizer
from .documents import Unit
from .encoding import DocumentEncoder
from .manifest import read_checked, write_checked
from .progress import byte_progress
from .shards import write_shard
from .sources import open_source
from .streams import is_whole

SHARD_FILE = "shard.json"
REMEDY = "name a folder with room, or make room and give the command again"


@dataclass(frozen=True)
class ShardJob:
    """All that a process needs to write one shard."""

    folder: Path
    name: str
    units: list[Unit]
    config: DataConfig
    threshold: int
    fingerprint: str
    key: str  # of the preparation


def is_done(shard: Path, key: str) -> bool:
    """Whether a shard of this preparation is there as it was written; any other is removed."""
    told = read_checked(shard / SHARD_FILE)
    if told.get("preparation") == key and is_whole(shard, [{"directory": ".", **told}]):
        return True
    discard(shard)
    return False


def write_shards(jobs: list[ShardJob], description: str, num_processes: int) -> None:
    total = sum(unit.num_bytes for job in jobs for unit in job.units)
    with byte_progress(description, total) as advance:
        if num_processes == 1 or len(jobs) < 2:
            for job in jobs:
                advance(_write_shard(job, available_cpus() if num_processes > 1 else 1))
            return
        # Spawned, not forked: the parent has threads.
        context = multiprocessing.get_context("spawn")
        number = min(num_processes, len(jobs))
        with concurrent.futures.ProcessPoolExecutor(
            number, mp_context=context, initializer=_end_with_parent
        ) as pool:
            waiting = [pool.submit(_write_shard, job, 1) for job in jobs]
            try:
                for finished in concurrent.futures.as_completed(waiting):
                    advance(finished.result())
            except concurrent.futures.process.BrokenProcessPool as error:
                raise UserError(
                    "a process that tokenises was killed (out of memory?): give the command again "
                    "to go on, with fewer --processes"
                ) from error
            finally:
                pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Has this process end when its parent does, even by SIGKILL: it would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _write_shard(job: ShardJob, num_threads: int) -> int:
    """Writes one shard and returns the bytes of its units."""
    source = open_source(job.config)
    if source.fingerprint() != job.fingerprint:
        raise UserError(f"{source.description} changed while it was read: start again elsewhere")
    tokenizer = prepared_tokenizer(job.folder)
    with publish(job.folder / job.name, remedy=REMEDY) as directory:
        shard = write_shard(
            directory,
            source,
            job.units,
            DocumentEncoder(job.config, tokenizer),
            vocab_size=tokenizer.vocab_size,
            threshold=job.threshold,
            skip_bad=job.config.on_bad_record == "skip",
            num_threads=num_threads,
            advance=lambda _: None,
        )
        write_checked(directory / SHARD_FILE, {**shard, "preparation": job.key})
    return sum(unit.num_bytes for unit in job.units)
