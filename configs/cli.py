"""The command line of train.py and its siblings: Hydra's, with mistakes in one line.

A plain run composes and checks the configuration, then calls the program without Hydra: no folders,
no change of directory, no logging of Hydra's. Sweeps (-m), --cfg, --info and --help are Hydra's
own, started once the configuration has been checked.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from .. import __version__
from ..errors import RunStopped, SaidElsewhere, UserError
from . import mistakes
from .compose import (
    CONFIG_MODULE,
    VERSION_BASE,
    compose,
    initialized,
    parse,
    prepared,
    schema_of,
    to_dataclass,
)
from .fields import keys
from .from_checkpoint import with_checkpoint

USAGE_ERROR = 2  # exit status for mistakes of the user
INTERRUPTED = 130  # of a program that SIGINT aborted


def run(
    main: Callable[[Any], int], argv: Sequence[str] | None = None, config_name: str = "train"
) -> int:
    """Runs `main` with the configuration that the command line describes.

    Args:
      main: takes the configuration's dataclass and returns an exit status.
      argv: the arguments after the program's name; None takes sys.argv's.
      config_name: the primary YAML file and, through `compose.SCHEMAS`, the dataclass.

    Returns:
      The exit status: `main`'s, 0 for `RunStopped`, 2 after a `UserError` (printed as one line),
      for a sweep 1 if a job failed and 128 + the signal's number if one stopped it. With
      HYDRA_FULL_ERROR=1 in the environment, errors are raised instead.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _options(arguments)
        name = options.config_name or config_name
        if options.multirun:
            return _sweep(main, options, name)
        composed = compose(options.overrides, name, options.config_dir)
        if options.help or options.hydra_help:  # even where a required value is missing
            return _show(options, name)
        config = to_dataclass(composed, schema_of(name))
        if options.cfg or options.info:
            return _show(options, name)
        return main(config)
    except RunStopped:
        return 0
    except SaidElsewhere:
        return USAGE_ERROR
    except UserError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR


def _show(options: argparse.Namespace, name: str) -> int:
    """--help, --cfg and --info, which print instead of running."""
    known = keys(schema_of(name))
    if options.cfg == "job" and options.package not in (None, "_global_", *known):
        raise UserError(mistakes.unknown_key(options.package, known))
    if options.info:  # Hydra logs it to stdout: not also to a handler that a library left,
        logging.getLogger().handlers.clear()
        logging.raiseExceptions = False  # nor with complaints about `| head`
    try:
        _hydra(lambda _: None, options, name)
        sys.stdout.flush()
    except SystemExit as stop:  # how Hydra's --help ends
        return int(stop.code or 0)
    except BrokenPipeError:  # `| head`: what is left to print must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: --help shows the usage")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses those of Hydra's flags that make sense here; Hydra parses them again itself."""
    parser = _OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--version", action="version", version=f"fp4zoo {__version__}")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--multirun", "-m", action="store_true")
    instead.add_argument("--help", "-h", action="store_true")
    instead.add_argument("--hydra-help", action="store_true")
    instead.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    infos = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    instead.add_argument("--info", "-i", nargs="?", const="all", choices=infos)
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    options = parser.parse_intermixed_args(arguments)  # flags and overrides in any order
    if (options.resolve or options.package) and not options.cfg:
        parser.error("--resolve and --package go with --cfg")
    return options


def _sweep(main: Callable[[Any], int], options: argparse.Namespace, name: str) -> int:
    """Checks every job of a sweep, then runs them all through Hydra's launcher."""
    schema = schema_of(name)
    with initialized(options.config_dir):
        overrides = parse(options.overrides)
        jobs = list(_jobs(overrides))
    for job in jobs:
        to_dataclass(compose(job, name, options.config_dir), schema)
    swept = {override.key_or_group for override in overrides if override.is_sweep_override()}

    def task(composed: DictConfig) -> None:
        task_overrides = list(HydraConfig.get().overrides.task)
        config = to_dataclass(with_checkpoint(composed, parse(task_overrides)), schema)
        if "output_dir" not in swept:  # jobs must not resume from one another's checkpoints
            config = dataclasses.replace(config, output_dir=HydraConfig.get().runtime.output_dir)
        print(f"=== {config.output_dir}", flush=True)
        try:
            status = main(config)
        except RunStopped as stop:
            raise _SweepStopped(stop.signal) from stop
        if status == INTERRUPTED:
            raise _SweepStopped(signal.SIGINT)
        if status != 0:
            raise _JobFailed(f"{config.output_dir}: exit status {status}")

    unswept = [override.key_or_group for override in overrides if not override.is_sweep_override()]
    extra = [f"hydra.job.config.override_dirname.exclude_keys={_list(unswept)}"]
    fixed = [line for line in options.overrides if line.startswith("output_dir=")]
    if fixed and "output_dir" not in swept:
        extra.append(f"hydra.sweep.dir={fixed[-1].partition('=')[2]}")
    try:
        _hydra(task, options, name, extra)
    except _SweepStopped as stop:
        name = signal.Signals(stop.signal).name
        print(f"error: the sweep was stopped by {name}: no other job was started", file=sys.stderr)
        return 128 + stop.signal
    except _JobFailed as failure:
        print(f"error: a job of the sweep failed: {failure}", file=sys.stderr)
        return 1
    return 0


class _JobFailed(Exception):
    """How a job's exit status leaves Hydra's launcher."""


class _SweepStopped(BaseException):  # not an Exception: Hydra would go on with the next job
    def __init__(self, number: int):
        self.signal = number


def _jobs(overrides: Sequence[Override]) -> Iterator[list[str]]:
    """Every combination of a sweep's values, as Hydra's basic sweeper makes them."""
    alternatives = []
    for override in overrides:
        if override.is_discrete_sweep():
            key = override.get_key_element()
            alternatives.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        elif not override.is_sweep_override():
            alternatives.append([str(override.input_line)])
        # an interval is for other sweepers than the basic one: its values are checked in the job
    for combination in itertools.product(*alternatives):
        yield list(combination)


def _list(names: Sequence[str]) -> str:
    return "[" + ",".join(names) + "]"


def _hydra(
    task: Callable[[DictConfig], None],
    options: argparse.Namespace,
    name: str,
    extra: Sequence[str] = (),
) -> None:
    """Runs Hydra's own main on the command line, with `extra` overrides."""
    command = [Path(sys.argv[0]).name, *_flags(options), *options.overrides, *extra]
    with prepared(options.config_dir), _command_line(command):
        hydra.main(f"pkg://{CONFIG_MODULE}", config_name=name, version_base=VERSION_BASE)(task)()


def _flags(options: argparse.Namespace) -> list[str]:
    """The flags for Hydra, which wants its overrides together behind them.

    Without --config-dir: `prepared` sees to it, for primary files too.
    """
    return [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in vars(options).items()
        if value and name not in ("overrides", "config_dir")
    ]


@contextlib.contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    """Hydra reads sys.argv, and exits on errors unless this variable tells it to raise them."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = arguments
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
