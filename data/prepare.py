"""Tokenises text once: `python -m fp4zoo.data.prepare DIRECTORY data.path=... data.tokenizer=...`.

The folder then stands for the text: `python train.py data=text data.path=DIRECTORY`. It holds

    plan.json        what is prepared, and which documents go into which shard
    tokenizer/       the tokenizer, which train.py takes from here
    00000/, ...      a shard each, see streams.py; written by several processes, whole or not at all
    manifest.json    written last: counts, hashes, the configuration

A command that was stopped goes on where it was when it is given again. Exit status: 0 when the
folder is complete, 2 for a mistake (one line on standard error), 130 when interrupted.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError, exit_status
from .arguments import config_from_arguments
from .cache import hash_of, not_writable
from .config import DataConfig
from .corpus import about_corpus, available_cpus, describe_result, prepared_tokenizer
from .default_tokenizer import load_tokenizer
from .documents import Source, Unit, split_threshold
from .encoding import DocumentEncoder
from .manifest import (
    FORMAT,
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    make_manifest,
    read_checked,
    read_manifest,
    write_checked,
    write_manifest,
)
from .progress import note
from .shard_jobs import REMEDY, SHARD_FILE, ShardJob, is_done, write_shards
from .sources import PLAN_FILE, open_source, prepared_folder

_LOCK_FILE = ".lock"
_DEFAULT_VOCABULARY = 32_768
_NO_LIMIT = 1 << 40
_CHANGE_NOTHING = ("data.cache_dir", "data.num_workers")


def prepare(
    config: DataConfig,
    folder: Path,
    *,
    vocab_size: int | None = None,
    shard_megabytes: int = 64,
    num_processes: int | None = None,
) -> dict[str, Any]:
    """Tokenises `config`'s source into `folder`; goes on with what an earlier call left unfinished.

    Args:
      config: one source; `sources` has to be empty.
      folder: where to; new, empty, or of the same preparation.
      vocab_size: of a tokenizer that is trained (None: 32768), and the most that a given one may
        have (None: any).
      shard_megabytes: about how much of the source's bytes go into a shard.
      num_processes: that encode; None: one per CPU.

    Returns:
      The manifest.

    Raises:
      UserError: the folder holds something else, or the source or the tokenizer is at fault.
    """
    if config.sources:
        raise UserError(
            "data.sources: prepare each source into a folder of its own, and list the folders in "
            "data.sources for train.py"
        )
    source = open_source(config)
    if config.path is not None and folder.resolve().is_relative_to(Path(config.path).resolve()):
        raise UserError(f"{folder} is inside data.path={config.path}: name a folder elsewhere")
    settings = {
        "version": FORMAT,
        "files": source.fingerprint(),
        **{f"data.{key}": value for key, value in dataclasses.asdict(config).items()},
        "--vocab-size": vocab_size,
        "--shard-megabytes": shard_megabytes,
    }
    for key in _CHANGE_NOTHING:
        del settings[key]
    with _alone_in(folder):
        try:
            return _prepare(config, folder, source, settings, num_processes)
        except OSError as error:
            raise not_writable(folder, error, REMEDY) from error


def _prepare(
    config: DataConfig,
    folder: Path,
    source: Source,
    settings: dict[str, Any],
    num_processes: int | None,
) -> dict[str, Any]:
    began = time.perf_counter()
    key = hash_of(**settings)
    plan = _plan(config, folder, settings)
    tokenizer = prepared_tokenizer(folder)
    encoder = DocumentEncoder(config, tokenizer)
    if encoder.settings() != plan["encoder"]:
        raise UserError(
            f"{folder} was begun with another chat template: restore it, or name another folder"
        )
    threshold = plan["threshold"]
    shards: dict[str, list[Unit]] = {
        name: [Unit(**unit) for unit in units] for name, units in plan["shards"].items()
    }
    jobs = [
        ShardJob(folder, name, units, config, threshold, source.fingerprint(), key)
        for name, units in shards.items()
        if not is_done(folder / name, key)
    ]
    done = len(shards) - len(jobs)
    if done:
        note(f"data: {done} of {len(shards)} shards of {folder} are there already")
    if read_manifest(folder) is None or jobs:
        write_shards(jobs, f"Tokenising {source.description}", num_processes or available_cpus())
        written = [
            {"directory": name, **read_checked(folder / name / SHARD_FILE)} for name in shards
        ]
        about = about_corpus(config, source, tokenizer, encoder, threshold)
        manifest = make_manifest(folder, written, **about)
        write_manifest(folder, manifest)
        for left in folder.glob("*.partial-*"):  # of an earlier command that was killed
            shutil.rmtree(left, ignore_errors=True)
        note(describe_result(manifest, time.perf_counter() - began))
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"{folder} was changed while it was written: remove it and start again")
    return manifest


def _plan(config: DataConfig, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The plan in the folder if it is the same preparation's, else a new one with the tokenizer."""
    file = folder / PLAN_FILE
    if file.is_file():
        plan = read_checked(file)
        others = [key for key in settings if plan.get("settings", {}).get(key) != settings[key]]
        if not others:
            return plan
        if len(others) > 1 and "files" in others:  # whose fingerprint covers how they are read
            others.remove("files")
        if any(folder.glob(f"*/{SHARD_FILE}")):
            raise UserError(
                f"{folder} holds another preparation (other {', '.join(others)}): remove it, or "
                "name another folder"
            )
        file.unlink()  # nothing was done by it
    partial = file.with_suffix(".partial")
    if not {path.name for path in folder.iterdir()} <= {TOKENIZER_FOLDER, partial.name, _LOCK_FILE}:
        raise UserError(f"{folder} is not an empty folder: name another")
    limit = _DEFAULT_VOCABULARY if config.tokenizer is None else _NO_LIMIT
    tokenizer = load_tokenizer(config, settings["--vocab-size"] or limit)
    encoder = DocumentEncoder(config, tokenizer)  # complains before anything is written
    source = open_source(config)
    groups: list[list[Unit]] = []
    shard_bytes, size = settings["--shard-megabytes"] << 20, 0
    for unit in source.units(shard_bytes):
        size += unit.num_bytes
        if groups and size <= shard_bytes:
            groups[-1].append(unit)
        else:
            groups.append([unit])
            size = unit.num_bytes
    plan = {
        "settings": settings,
        "encoder": encoder.settings(),
        "threshold": split_threshold(source, config.validation_fraction),
        "shards": {
            f"{number:05d}": [dataclasses.asdict(unit) for unit in units]
            for number, units in enumerate(groups)
        },
    }
    (folder / TOKENIZER_FOLDER).mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / TOKENIZER_FOLDER)
    write_checked(file, plan)
    return plan


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Makes the folder, and keeps other processes of this command out of it, until this one ends
    however it ends.

    Raises:
      UserError: it cannot be made, or another process is at work in it.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK_FILE).open("w")
    except OSError as error:
        raise not_writable(folder, error, REMEDY) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process is preparing {folder}: wait for it, or name another folder"
            ) from error
        try:
            yield
        finally:
            (folder / _LOCK_FILE).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it holds something
                if is_new:
                    folder.rmdir()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (None: sys.argv's) and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fp4zoo.data.prepare",
        description="Tokenises text once into a folder that train.py takes as data.path.",
    )
    parser.add_argument("folder", type=Path, help="where to; given again, the command goes on")
    parser.add_argument(
        "settings",
        nargs="*",
        help="data.path=... (default: the standard library) and other data.* keys",
    )
    parser.add_argument(
        "--vocab-size", type=int, help="the model's, for a trained tokenizer (default 32768)"
    )
    parser.add_argument("--shard-megabytes", type=int, default=64, help="of text per shard")
    parser.add_argument("--processes", type=int, help="default: one per CPU")
    arguments = parser.parse_intermixed_args(argv)
    return exit_status(lambda: _prepare_as_told(arguments))


def _prepare_as_told(arguments: argparse.Namespace) -> int:
    config = config_from_arguments(arguments.settings)
    if prepared_folder(config.path) is not None:
        raise UserError(f"data.path={config.path} is prepared already")
    for option in ("vocab_size", "shard_megabytes", "processes"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise UserError(f"--{option.replace('_', '-')}={value}: give 1 or more")
    try:
        manifest = prepare(
            config,
            arguments.folder,
            vocab_size=arguments.vocab_size,
            shard_megabytes=arguments.shard_megabytes,
            num_processes=arguments.processes,
        )
    except KeyboardInterrupt:
        note("give the same command again to go on")
        raise
    print(
        f"{arguments.folder}: shards: {len(manifest['shards'])}, "
        f"{manifest['train']['tokens']:,} training tokens, "
        f"{manifest['validation']['tokens']:,} held out, digest {manifest['digest']}; "
        f"{MANIFEST_FILE} tells the rest"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
