"""How fast the data pipeline is, on one CPU: `python benchmarks/data.py`.

Prints medians of several rounds, all in one run:

- tokens per second of packed batches: the cached default corpus for three shapes and both packings,
  a mixture, and a prepared folder of several shards;
- tokenising (read, hash, split, encode, write) against bare SentencePiece and bare `tokenizers` on
  the same documents, each encoding in this process with one thread;
- how far memory grows while ten million tokens are read, and while a file is tokenised;
- how long a restore at step 1,000,000 takes;
- with --train, the share of llama-tiny's step that train.py waits for data.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import sentencepiece
import tokenizers

from fp4zoo.data import (
    DataConfig,
    Tokenizer,
    TrainIterator,
    load_corpus,
    load_tokenizer,
    load_tokenizer_file,
    make_train_iterator,
)
from fp4zoo.data.documents import all_kept
from fp4zoo.data.prepare import prepare
from fp4zoo.data.sources import open_source

VOCAB_SIZE = 4096
SHAPES = ((8, 256), (8, 2048), (64, 2048))
TOKENS_PER_ROUND = 4_000_000
MEMORY_TOKENS = 10_000_000
LARGE_FILES = (50, 200)  # megabytes


def main(argv: list[str]) -> int:
    """Runs the measurements and prints them; returns the exit status."""
    parser = argparse.ArgumentParser(description="How fast the data pipeline is.")
    parser.add_argument("--rounds", type=int, default=5, help="rounds behind each median")
    parser.add_argument("--path", help="text instead of the default corpus")
    parser.add_argument("--train", action="store_true", help="also run train.py for some steps")
    arguments = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs, one of them used")
    config = DataConfig(path=arguments.path)
    tokenizer = load_tokenizer(config, VOCAB_SIZE)
    with tempfile.TemporaryDirectory() as directory:
        _packed_batches(config, tokenizer, arguments.rounds, Path(directory, "prepared"))
        _memory_and_restore(config, tokenizer)
        _compare_tokenising(config, tokenizer, arguments.rounds, Path(directory))
        _tokenise_large_files(Path(directory))
        if arguments.train:
            _data_wait(Path(directory, "run"))
    return 0


def _packed_batches(config: DataConfig, tokenizer: Tokenizer, rounds: int, folder: Path) -> None:
    kinds = {packing: dataclasses.replace(config, packing=packing) for packing in
             ("concatenate", "best_fit")}  # fmt: skip
    sources = ({"path": str(folder), "weight": 3}, {"path": str(folder), "weight": 1})
    kinds["mixture of two sources"] = DataConfig(sources=sources)  # pyright: ignore
    prepare(
        dataclasses.replace(config, tokenizer=_saved(tokenizer, folder.parent)),
        folder,
        shard_megabytes=4,
        num_processes=1,
    )
    kinds["prepared folder"] = DataConfig(path=str(folder))
    for kind, kind_config in kinds.items():
        for batch_size, sequence_length in SHAPES:
            iterator = make_train_iterator(
                kind_config,
                tokenizer,
                batch_size=batch_size,
                sequence_length=sequence_length,
                seed=0,
            )
            number = TOKENS_PER_ROUND // (batch_size * sequence_length)
            _read(iterator, number)
            read = functools.partial(_read, iterator, number)
            wall, cpu = [], []
            for _ in range(rounds):
                began = time.process_time()
                wall.append(_seconds(read))
                cpu.append(time.process_time() - began)
            millions = number * batch_size * sequence_length / 1e6
            print(
                f"{kind}, batches of {batch_size} x {sequence_length}: "
                f"{millions / statistics.median(wall):.1f} M tokens/s "
                f"({millions / statistics.median(cpu):.1f} M per second of CPU time)"
            )


def _memory_and_restore(config: DataConfig, tokenizer: Tokenizer) -> None:
    iterator = make_train_iterator(config, tokenizer, batch_size=8, sequence_length=256, seed=1)
    number = MEMORY_TOKENS // (8 * 256)
    _read(iterator, number)  # one epoch maps the token file
    before = _resident_megabytes()
    _read(iterator, number)
    print(f"memory over {MEMORY_TOKENS:,} tokens: {_resident_megabytes() - before:+.1f} MB")
    state = iterator.get_state() | {"rows_read": 8 * 1_000_000}

    def restore() -> None:
        iterator.set_state(state)
        next(iterator)

    print(f"restore and first batch at step 1,000,000: {_seconds(restore) * 1e3:.1f} ms")


def _compare_tokenising(
    config: DataConfig, tokenizer: Tokenizer, rounds: int, directory: Path
) -> None:
    """The bare library and the whole way to token files, turn by turn."""
    texts = [document.text for document in all_kept(open_source(config))]
    processor = sentencepiece.SentencePieceProcessor(model_file=_saved(tokenizer, directory))
    hugging_face_file = _train_byte_level(texts, directory)
    hugging_face = tokenizers.Tokenizer.from_file(str(hugging_face_file))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    bare_functions: dict[str, tuple[Tokenizer, Callable[[], object]]] = {
        "SentencePiece": (tokenizer, lambda: processor.encode(texts, num_threads=1)),
        "tokenizers": (
            load_tokenizer_file(hugging_face_file),
            lambda: hugging_face.encode_batch_fast(texts, add_special_tokens=False),
        ),
    }
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    for name, (ours, bare) in bare_functions.items():
        bare_seconds, seconds = [], []
        for number in range(rounds):
            bare_seconds.append(_seconds(bare))
            empty = dataclasses.replace(config, cache_dir=str(directory / f"{name}{number}"))
            tokenise = functools.partial(load_corpus, empty, ours)
            seconds.append(_seconds(tokenise))
        rate = megabytes / statistics.median(seconds)
        bare_rate = megabytes / statistics.median(bare_seconds)
        print(
            f"tokenising {megabytes:.1f} MB: {rate:.2f} MB/s, bare {name} {bare_rate:.2f} MB/s, "
            f"ratio {rate / bare_rate:.2f}"
        )


def _tokenise_large_files(directory: Path) -> None:
    """The peak memory of processes of their own that tokenise files of two sizes, as bytes."""
    if not Path("/proc/self/status").exists():
        return
    code = (
        "import sys; from fp4zoo.data import *; config = DataConfig(path=sys.argv[1], "
        "tokenizer='bytes', cache_dir=sys.argv[2]); load_corpus(config, ByteTokenizer()); "
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    line = json.dumps({"text": "some words of a document " * 80}) + "\n"
    for megabytes in LARGE_FILES:
        file = directory / f"{megabytes}.jsonl"
        with open(file, "w") as stream:
            for number in range(megabytes * 1_000_000 // len(line)):
                stream.write(line.replace("some", str(number), 1))
        command = [sys.executable, "-c", code, str(file), str(directory / f"large{megabytes}")]
        began = time.perf_counter()
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        seconds = time.perf_counter() - began
        print(
            f"tokenising {megabytes} MB of JSONL: peak {int(output) / 1e3:.0f} MB, {seconds:.1f} s"
        )


def _data_wait(directory: Path) -> None:
    """What train.py's own metrics say, with the default corpus."""
    train = Path(__file__).resolve().parents[1] / "train.py"
    options = ["model=llama-tiny", "max_steps=30", "log_every=10", "save_every=0"]
    options += ["evaluate_every=0", "evaluation_batches=1", "sample_tokens=0"]
    command = [sys.executable, str(train), *options, f"output_dir={directory}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    waits = [row["data_wait"] for row in rows if "data_wait" in row]
    print(f"train.py waits for data: {max(waits):.3%} of llama-tiny's steps at most")


def _train_byte_level(texts: list[str], directory: Path) -> Path:
    """A byte-level BPE tokenizer.json of the same vocabulary size."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator(texts[:100], trainer)
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def _saved(tokenizer: Tokenizer, directory: Path) -> str:
    return str(tokenizer.save(directory))


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
