"""Checkpoints in and out: `python convert.py from-hf DIR OUT`; `--help` lists the rest.

Exit status: 0 when done, 1 when `verify` found differences or the system failed, 2 for a mistake in
the command or a damaged source, 130 when interrupted. Nothing is left of an output that was not
completed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fp4zoo import interop
from fp4zoo.errors import UserError, discard_output
from fp4zoo.interop.calibration import Calibration, calibrate
from fp4zoo.interop.checkpoint import open_checkpoint
from fp4zoo.interop.inspection import describe
from fp4zoo.interop.loading import load_model, load_tokenizer_of, token_rows
from fp4zoo.interop.verification import compare_tensors, divergence

_CALIBRATION_ROWS, _CALIBRATION_LENGTH = 32, 512
_SHOWN_DIFFERENCES = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (None: sys.argv's) and returns the exit status."""
    try:
        options = _parser().parse_args(argv)
        return options.run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head`
        discard_output()
        return 0
    except OSError as error:  # such as a full disk behind stdout
        discard_output()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130


def _from_hf(options: argparse.Namespace) -> int:
    with _progress("converting") as progress:
        interop.from_hugging_face(
            options.source, options.output, pad_vocabulary=options.pad_vocabulary, progress=progress
        )
    _say_next(options.output)
    return 0


def _from_gguf(options: argparse.Namespace) -> int:
    with _progress("converting") as progress:
        interop.from_gguf(
            options.source, options.output, tokenizer=options.tokenizer, progress=progress
        )
    _say_next(options.output)
    return 0


def _to_hf(options: argparse.Namespace) -> int:
    if not 0 < options.shard_gb < math.inf:
        raise UserError(f"--shard-gb {options.shard_gb} must be a positive number of gigabytes")
    if options.text is not None and options.activations is None:
        raise UserError("--text is for --activations calibrated: give both or neither")
    shard_bytes = round(options.shard_gb * 1e9)
    if options.format == "plain":
        for key in ("activations", "kv_cache", "scales"):
            if getattr(options, key) is not None:
                raise UserError(f"--{key.replace('_', '-')} is for --format nvfp4: name a format")
        with _progress("writing") as progress:
            interop.to_hugging_face(
                options.source, options.output, dtype=options.dtype, shard_bytes=shard_bytes,
                progress=progress,
            )  # fmt: skip
    else:
        if options.dtype is not None:
            raise UserError(f"--dtype={options.dtype}: NVFP4 folders are bfloat16; leave it out")
        settings = interop.ExportOptions(
            options.format,
            _calibration(options) if options.activations == "calibrated" else None,
            options.kv_cache,
            options.scales or "float32",
        )
        with _progress("quantising") as progress:
            interop.to_nvfp4(
                options.source, options.output, settings, shard_bytes=shard_bytes,
                progress=progress,
            )  # fmt: skip
    print(options.output)
    return 0


def _calibration(options: argparse.Namespace) -> Calibration:
    source = open_checkpoint(options.source)
    tokens = _tokens(options, source)
    model = load_model(source, activation_dtype="bfloat16", recipe="bf16")
    return calibrate(model, [np.asarray(tokens[i : i + 1]) for i in range(len(tokens))])


def _inspect(options: argparse.Namespace) -> int:
    print(describe(options.source))
    return 0


def _verify(options: argparse.Namespace) -> int:
    source = open_checkpoint(options.source)
    differences = compare_tensors(source, options.output)
    differing = sorted((d for d in differences if d.largest), key=lambda d: -d.relative)
    print(f"{len(differences)} tensors, {len(differences) - len(differing)} identical")
    shown = differing if options.all else differing[:_SHOWN_DIFFERENCES]
    for d in shown:
        note = "" if d.is_fine else "  more than rounding explains"
        print(f"{d.name}: largest {d.largest:.3g}, relative rms {d.relative:.3g}{note}")
    if len(shown) < len(differing):
        print(f"and {len(differing) - len(shown)} more: --all lists them")
    if source.tokenizer_folder is not None:
        tokens = _tokens(options, source)
        kl = divergence(load_model(source), interop.load_hugging_face(options.output), tokens)
        print(f"KL divergence on {tokens.size:,} tokens: {kl:.3g} nats a token")
    else:
        print("no tokenizer came with the checkpoint, so predictions are not compared")
    return 0 if all(d.is_fine for d in differences) else 1


def _tokens(options: argparse.Namespace, source):
    """Tokens of --text, or of a module of this Python's standard library."""
    path = Path(argparse.__file__ if options.text is None else options.text)
    try:
        if not path.is_file():  # a device may never end
            raise ValueError("not a file")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--text={path} cannot be read ({error}): give a UTF-8 file") from error
    length = min(_CALIBRATION_LENGTH, source.model.max_positions)
    return token_rows(load_tokenizer_of(source), text, length=length, most=_CALIBRATION_ROWS)


def _say_next(output: str) -> None:
    print(f"{output}\nfine-tune: python train.py checkpoint={output} ...\n"
          f"run:       python generate.py checkpoint={output} prompt='...'")  # fmt: skip


class _progress:
    """A progress bar on stderr that starts when the total is known."""

    def __init__(self, what: str):
        self.what = what
        self.bar = Progress(
            f"{what} {{task.percentage:3.0f}} %", BarColumn(), DownloadColumn(),
            TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )  # fmt: skip

    def __enter__(self) -> Callable[[int], Callable[[int], object]]:
        self.bar.start()
        return self._begin

    def __exit__(self, *details: object) -> None:
        self.bar.stop()

    def _begin(self, total: int) -> Callable[[int], object]:
        task = self.bar.add_task(self.what, total=total)
        return lambda nbytes: self.bar.advance(task, nbytes)


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: --help shows the usage")


def _path(text: str) -> str:
    """A path as the system can take it, with ~ replaced."""
    try:
        path = str(Path(text).expanduser())
        os.fsencode(path)
        if not text or "\0" in text:
            raise ValueError("no path")
    except (RuntimeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no path ({error})") from error
    return path


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(prog="convert.py", description="Checkpoints in and out.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run, source: str, output: str | None, text: str):
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("source", metavar=source, type=_path)
        if output is not None:
            sub.add_argument("output", metavar=output, type=_path)
        return sub

    sub = command(
        "from-hf", _from_hf, "DIR", "OUT", "a Hugging Face folder (plain or NVFP4) into ours"
    )
    sub.add_argument("--pad-vocabulary", type=int, default=1, metavar="N",
                     help="pad the vocabulary to a multiple of N")  # fmt: skip
    sub = command("from-gguf", _from_gguf, "FILE", "OUT", "a GGUF file into ours")
    sub.add_argument(
        "--tokenizer",
        type=_path,
        metavar="DIR",
        help="folder with tokenizer files to take in place of the file's own",
    )
    sub = command("to-hf", _to_hf, "CKPT", "DIR", "a checkpoint of ours into a Hugging Face folder")
    sub.add_argument("--format", choices=["plain", "nvfp4", "modelopt-nvfp4"], default="plain",
                     help="nvfp4: compressed-tensors, for vLLM and transformers")  # fmt: skip
    sub.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                     help="of plain weights; without it what they came in")  # fmt: skip
    sub.add_argument("--activations", choices=["calibrated"],
                     help="measure activations on --text and quantise them too (W4A4)")  # fmt: skip
    sub.add_argument("--kv-cache", choices=["fp8", "nvfp4"], help="ModelOpt: write cache scales")
    sub.add_argument("--scales", choices=["float32", "bfloat16"],
                     help="arithmetic of compressed-tensors' scales; bfloat16 is llm-compressor's "
                     "for bfloat16 weights")  # fmt: skip
    sub.add_argument(
        "--text", type=_path, metavar="FILE", help="calibration text; default: Python source"
    )
    sub.add_argument("--shard-gb", type=float, default=5.0, metavar="GB",
                     help="split the weights over files of this size")  # fmt: skip
    command("inspect", _inspect, "PATH", None, "what a checkpoint, folder or file is")
    sub = command("verify", _verify, "CKPT", "DIR", "a folder against the checkpoint it came from")
    sub.add_argument("--text", type=_path, metavar="FILE", help="text to compare predictions on")
    sub.add_argument("--all", action="store_true", help="list every differing tensor")
    return parser


if __name__ == "__main__":
    sys.exit(main())
