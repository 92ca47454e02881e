"""Shows what a run would read: `python -m fp4zoo.data.inspect data.path=... sequence_length=256`.

Prints packed rows as text, every document of a row in a colour of its own and targets that are not
trained on dimmed; a histogram of document lengths; tokens per source; how full the rows are; and
the share of unknown and byte-fallback tokens. Exit status 2 for a mistake, in one line.
"""

import argparse
import io
import sys
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..errors import UserError, exit_status, printable
from .arguments import config_from_arguments
from .config import DataConfig
from .corpus import Corpus
from .default_tokenizer import load_tokenizer
from .packing import Batch
from .pipeline import TrainIterator, make_train_iterator
from .tokenizer import Tokenizer

_COLOURS = ("green", "cyan", "yellow", "magenta", "blue", "red")
_BORDER = "\N{BROKEN BAR}"
_BAR = 40
_CHUNK = 1 << 22
_DEFAULT_VOCABULARY = 32_768
_NO_LIMIT = 1 << 40
_LEAST_WIDTH = 80  # columns; a narrower terminal wraps the lines


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # `| head` is no mistake; the library would exit with 1


def decoded_rows(batch: Batch, tokenizer: Tokenizer) -> list[Text]:
    """Each row's targets as text: a border and the next colour at every document."""
    rows = []
    for targets, segments, mask in zip(
        batch["targets"], batch["segment_ids"], batch["loss_mask"], strict=True
    ):
        row = Text()
        for segment in range(1, int(segments.max()) + 1):
            colour = _COLOURS[(segment - 1) % len(_COLOURS)]
            places = np.flatnonzero(segments == segment)
            row.append(f"{_BORDER}{segment} ", style=f"bold reverse {colour}")
            # Runs of targets that are trained on, and of those that are not.
            for run in np.split(places, np.flatnonzero(np.diff(mask[places])) + 1):
                trained = mask[run[0]] > 0
                text = _visible(_spelled(tokenizer, targets[run].tolist()))
                row.append(text, style=colour if trained else f"dim {colour}")
        padding = int((segments == 0).sum())
        if padding:
            row.append(f"{_BORDER} {padding} x padding", style="bold reverse white")
        rows.append(row)
    return rows


def _spelled(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of `ids`, special tokens by their names."""
    names = {token: name for name, token in tokenizer.special_tokens.items()}
    text, run = "", []
    for token in ids:
        if token in names:
            text += tokenizer.decode(run) + names[token]
            run = []
        else:
            run.append(token)
    return text + tokenizer.decode(run)


def _visible(text: str) -> str:
    """`text` as it is but for characters that would act on the terminal."""
    return "".join(
        character if character in "\n\t\N{NO-BREAK SPACE}" else printable(character)
        for character in text
    )


def length_histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """(least, most, number) of document lengths in ranges of powers of two, empty ends left out."""
    if not len(lengths):
        return []
    powers = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(powers)
    first = int(np.flatnonzero(counts)[0])
    return [
        (1 << power, (2 << power) - 1, int(counts[power])) for power in range(first, len(counts))
    ]


def fallback_share(corpus: Corpus, tokenizer: Tokenizer) -> float:
    """The share of training tokens that are unknown or spell single bytes."""
    is_fallback = tokenizer.fallback_tokens()
    tokens, number = corpus.train.tokens, 0
    for begin in range(0, len(tokens), _CHUNK):
        number += int(is_fallback[tokens[begin : begin + _CHUNK]].sum())
    return number / max(1, len(tokens))


def show(
    console: Console,
    iterator: TrainIterator,
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    rows: int,
) -> None:
    """Prints everything, with the first `rows` of one batch of `iterator`."""
    corpus = iterator.corpus
    for number, row in enumerate(decoded_rows(next(iterator), tokenizer)[:rows]):
        console.rule(f"row {number}")
        console.print(row)
    if rows:
        console.print(f"({_BORDER}1, {_BORDER}2: documents of the row; dim: not trained on)")
    console.rule("documents by length in tokens")
    histogram = length_histogram(np.diff(corpus.train.starts))
    highest = max(count for _, _, count in histogram)
    for least, most, count in histogram:
        bar = "\N{FULL BLOCK}" * -(-_BAR * count // highest)
        console.print(f"{least:>9,} - {most:<9,} {count:>9,} {bar}", markup=False, highlight=False)
    table = Table("source", "documents", "tokens", "of rows", "held out", "dropped", "repeated")
    parts = corpus.parts or (corpus,)
    for part, share in zip(parts, iterator.shares, strict=True):
        train, dropped = part.manifest["train"], part.manifest["read"]["dropped"]
        table.add_row(
            escape(printable(part.description)),
            f"{train['documents']:,}",
            f"{train['tokens']:,}",
            f"{share:.2%}",
            f"{part.manifest['validation']['tokens']:,}",
            f"{sum(dropped.values()):,}",
            f"{part.manifest['duplicates']['repeated']:,}",
        )
    console.print(table)
    for part, packing in zip(parts, iterator.packings, strict=True):
        train = part.manifest["train"]
        line = (
            f"{printable(part.description)}: {config.packing}: {packing.report()}; "
            f"{train['trained_tokens'] / max(1, train['tokens']):.1%} of the tokens trained on"
        )
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"tokenizer: {printable(tokenizer.name)}, {tokenizer.vocab_size:,} tokens; "
        f"unknown or byte-fallback tokens: {fallback_share(corpus, tokenizer):.4%}; training "
        "documents also held out but for whitespace: "
        f"{corpus.manifest['duplicates']['across_splits']:,}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (None: sys.argv's) and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fp4zoo.data.inspect", description="Shows what a run would read."
    )
    parser.add_argument(
        "settings",
        nargs="*",
        help="data.path=... (default: the standard library) and other data.* keys",
    )
    parser.add_argument(
        "--rows", type=int, default=4, help="packed rows to show (default 4; 0: none)"
    )
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens in a row")
    parser.add_argument("--seed", type=int, default=0, help="of the order of rows")
    parser.add_argument("--vocab-size", type=int, help="of the model (default: any, or 32768)")
    parser.add_argument("--colour", choices=("auto", "always", "never"), default="auto")
    arguments = parser.parse_intermixed_args(argv)
    return exit_status(lambda: _inspect(arguments))


def _inspect(arguments: argparse.Namespace) -> int:
    config = config_from_arguments(arguments.settings)
    for option in ("rows", "sequence_length", "vocab_size"):
        value = getattr(arguments, option)
        least = 0 if option == "rows" else 1
        if value is not None and value < least:
            raise UserError(f"--{option.replace('_', '-')}={value}: give {least} or more")
    limit = _DEFAULT_VOCABULARY if config.tokenizer is None else _NO_LIMIT
    tokenizer = load_tokenizer(config, arguments.vocab_size or limit)
    iterator = make_train_iterator(
        config,
        tokenizer,
        batch_size=max(1, arguments.rows),
        sequence_length=arguments.sequence_length,
        seed=arguments.seed,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):  # an encoding without this character: escapes
        sys.stdout.reconfigure(errors="backslashreplace")
    forced = {"auto": None, "always": True, "never": False}[arguments.colour]
    console = _Console(force_terminal=forced, no_color=forced is False)
    console.width = max(console.width, _LEAST_WIDTH)
    show(console, iterator, tokenizer, config, rows=arguments.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
