"""How fast the data pipeline is, on one CPU: `python benchmarks/data.py`.

Prints medians of several rounds, all in one run:

- tokens per second of packed batches from the cached default corpus, for two shapes;
- tokenising (read, hash, split, encode, write) against bare SentencePiece on the same documents;
- how far memory grows while ten million tokens are read.
"""

import argparse
import dataclasses
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import sentencepiece

from fp4zoo.data import (
    DataConfig,
    TrainIterator,
    load_corpus,
    load_tokenizer,
    make_train_iterator,
)
from fp4zoo.data.corpus import open_source
from fp4zoo.data.documents import ReadReport, kept_documents

VOCAB_SIZE = 4096
SHAPES = ((8, 256), (8, 2048), (64, 2048))
TOKENS_PER_ROUND = 4_000_000
MEMORY_TOKENS = 10_000_000


def main(argv: list[str]) -> int:
    """Runs the measurements and prints them; returns the exit status."""
    parser = argparse.ArgumentParser(description="How fast the data pipeline is.")
    parser.add_argument("--rounds", type=int, default=5, help="rounds behind each median")
    parser.add_argument("--path", help="text instead of the default corpus")
    arguments = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    config = DataConfig(path=arguments.path)
    tokenizer = load_tokenizer(config, VOCAB_SIZE)

    for batch_size, sequence_length in SHAPES:
        shape = {"batch_size": batch_size, "sequence_length": sequence_length}
        iterator = make_train_iterator(config, tokenizer, seed=0, **shape)
        number = TOKENS_PER_ROUND // (batch_size * sequence_length)
        _read(iterator, number)
        seconds = statistics.median(
            _seconds(functools.partial(_read, iterator, number)) for _ in range(arguments.rounds)
        )
        rate = number * batch_size * sequence_length / seconds / 1e6
        print(f"packed batches of {batch_size} x {sequence_length}: {rate:.1f} million tokens/s")

    iterator = make_train_iterator(config, tokenizer, batch_size=8, sequence_length=256, seed=1)
    number = MEMORY_TOKENS // (8 * 256)
    _read(iterator, number)  # one epoch maps the token file
    before = _resident_megabytes()
    _read(iterator, number)
    print(f"memory over {MEMORY_TOKENS:,} tokens: {_resident_megabytes() - before:+.1f} MB")
    _compare_tokenising(config, arguments.rounds)
    return 0


def _compare_tokenising(config: DataConfig, rounds: int) -> None:
    """Bare SentencePiece and the whole way to token files, turn by turn."""
    tokenizer = load_tokenizer(config, VOCAB_SIZE)
    with tempfile.TemporaryDirectory() as directory:
        model = str(tokenizer.save(directory))
        processor = sentencepiece.SentencePieceProcessor(model_file=model)
        texts = [document.text for document in kept_documents(open_source(config), ReadReport())]
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        bare, whole = [], []
        for number in range(rounds):
            bare.append(_seconds(lambda: processor.encode(texts, num_threads=1)))
            empty = dataclasses.replace(config, cache_dir=str(Path(directory, str(number))))
            whole.append(_seconds(lambda empty=empty: load_corpus(empty, tokenizer)))
    bare_rate = megabytes / statistics.median(bare)
    whole_rate = megabytes / statistics.median(whole)
    print(
        f"tokenising {megabytes:.1f} MB: {whole_rate:.2f} MB/s, bare SentencePiece "
        f"{bare_rate:.2f} MB/s, ratio {whole_rate / bare_rate:.2f}"
    )


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _read(iterator: TrainIterator, number: int) -> None:
    for _ in range(number):
        next(iterator)


def _resident_megabytes() -> float:
    """Memory of this process now; 0 where the system does not say."""
    status = Path("/proc/self/statm")
    if not status.exists():
        return 0.0
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
