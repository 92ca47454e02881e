import dataclasses
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from fp4zoo.data import ByteTokenizer, DataConfig, load_corpus, load_tokenizer
from fp4zoo.errors import UserError


def texts(stream, tokenizer):
    """The documents of a stream, decoded; each must end with the end-of-document token."""
    documents = np.split(stream.tokens, stream.starts[1:-1]) if len(stream.tokens) else []
    assert all(document[-1] == tokenizer.eos_id for document in documents)
    return [tokenizer.decode(document[:-1]) for document in documents]


def corpora(cache_home):
    return sorted(path.name for path in (cache_home / "corpora").iterdir())


def test_every_document_is_in_one_split_or_counted(byte_config, text_directory):
    tokenizer = ByteTokenizer()
    corpus = load_corpus(byte_config, tokenizer)
    train, validation = (texts(split, tokenizer) for split in (corpus.train, corpus.validation))
    written = [path.read_text() for path in text_directory.iterdir()]
    assert sorted(train + validation) == sorted(text for text in written if text)
    assert not set(train) & set(validation) and train and validation
    read = corpus.manifest["read"]
    assert read["read"] == 42 == read["kept"] + sum(read["dropped"].values())
    assert read["dropped"] == {"empty": 1}
    assert corpus.manifest["duplicates"] == {"repeated": 1, "across_splits": 0}
    for split, documents in (("train", train), ("validation", validation)):
        counts = corpus.manifest[split]
        assert counts["documents"] == len(documents)
        assert counts["bytes"] == sum(len(text.encode()) for text in documents)
        assert counts["tokens"] == counts["bytes"] + counts["documents"]
        names = (corpus.directory / f"{split}.names").read_text().splitlines()
        assert len(names) == len(documents) and json.loads(names[0]).endswith(".txt")


def test_no_validation_split(byte_config):
    config = dataclasses.replace(byte_config, validation_fraction=0.0)
    corpus = load_corpus(config, ByteTokenizer())
    assert len(corpus.validation.tokens) == 0 and len(corpus.train.tokens) > 1000


def test_the_second_time_is_read_from_the_cache(byte_config, cache_home, monkeypatch):
    first = load_corpus(byte_config, ByteTokenizer())
    monkeypatch.setattr(ByteTokenizer, "encode_batch", None)
    second = load_corpus(byte_config, ByteTokenizer())
    np.testing.assert_array_equal(first.train.tokens, second.train.tokens)
    assert first.digest == second.digest and len(corpora(cache_home)) == 1


def test_another_file_tokenizer_or_split_is_another_entry(byte_config, cache_home, text_directory):
    tokenizer = ByteTokenizer()
    digests = [load_corpus(byte_config, tokenizer).digest]
    (text_directory / "file05.txt").write_text("changed")
    digests.append(load_corpus(byte_config, tokenizer).digest)
    config = dataclasses.replace(byte_config, validation_fraction=0.5)
    digests.append(load_corpus(config, tokenizer).digest)
    tokenizer.fingerprint = "other"
    digests.append(load_corpus(config, tokenizer).digest)
    assert len(set(digests)) == len(corpora(cache_home)) == 4


def test_the_digest_is_of_the_content_not_of_the_file_times(
    byte_config, cache_home, text_directory
):
    first = load_corpus(byte_config, ByteTokenizer())
    os.utime(text_directory / "file05.txt", ns=(1, 1))
    second = load_corpus(byte_config, ByteTokenizer())
    assert first.digest == second.digest and len(corpora(cache_home)) == 2


@pytest.mark.parametrize("damage", ["truncate", "no manifest", "bad manifest", "no starts"])
def test_a_damaged_entry_is_built_again(byte_config, cache_home, damage):
    first = load_corpus(byte_config, ByteTokenizer())
    expected = first.train.tokens.copy()
    if damage == "truncate":
        os.truncate(first.directory / "train.tokens", 10)
    elif damage == "no manifest":
        (first.directory / "manifest.json").unlink()
    elif damage == "bad manifest":
        (first.directory / "manifest.json").write_text("{")
    else:
        (first.directory / "train.starts.npy").unlink()
    np.testing.assert_array_equal(load_corpus(byte_config, ByteTokenizer()).train.tokens, expected)


LOADING = """
import pickle, sys
from fp4zoo.data import load_corpus, load_tokenizer
config = pickle.loads(bytes.fromhex(sys.argv[1]))
tokenizer = load_tokenizer(config, 1024)
print(tokenizer.fingerprint, load_corpus(config, tokenizer).train.tokens.sum())
"""


def test_two_processes_at_once_get_the_same(byte_config, cache_home):
    config = dataclasses.replace(byte_config, tokenizer=None)
    command = [sys.executable, "-c", LOADING, pickle.dumps(config).hex()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    results = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0] == results[1][0] != ""
    assert len(corpora(cache_home)) == 1 and not list(cache_home.glob("**/*.partial-*"))


def test_a_tokenizer_is_trained_once_and_fits_the_model(
    byte_config, cache_home, monkeypatch, capfd
):
    config = dataclasses.replace(byte_config, tokenizer=None)
    first = load_tokenizer(config, 4096)
    assert first.vocab_size <= 4096
    assert "trained SentencePiece" in capfd.readouterr().err
    monkeypatch.setattr("fp4zoo.data.default_tokenizer.train_sentencepiece", None)
    assert load_tokenizer(config, 4096).fingerprint == first.fingerprint


def test_a_damaged_tokenizer_in_the_cache_is_trained_again(byte_config, cache_home):
    config = dataclasses.replace(byte_config, tokenizer=None)
    fingerprint = load_tokenizer(config, 1024).fingerprint
    [file] = (cache_home / "tokenizers").glob("*/tokenizer.model")
    file.write_bytes(file.read_bytes()[:100])
    assert load_tokenizer(config, 1024).fingerprint == fingerprint


def test_the_tokenizer_never_sees_the_validation_split(byte_config, monkeypatch):
    sample = []

    def train(given, vocab_size, model_type):
        sample.extend(given)
        raise InterruptedError

    monkeypatch.setattr("fp4zoo.data.default_tokenizer.train_sentencepiece", train)
    with pytest.raises(InterruptedError):
        load_tokenizer(dataclasses.replace(byte_config, tokenizer=None), 4096)
    corpus = load_corpus(byte_config, ByteTokenizer())
    assert sorted(sample) == sorted(texts(corpus.train, ByteTokenizer()))


def test_a_model_smaller_than_the_tokenizer(byte_config):
    with pytest.raises(UserError, match=r"259 tokens but the model only 100.*vocab_size=259"):
        load_tokenizer(byte_config, 100)


def test_a_tokenizer_that_changes_text_is_said_to(byte_config, monkeypatch, capfd):
    monkeypatch.setattr(
        "fp4zoo.data.tokenizer.ByteTokenizer.__init__",
        lambda self: self.__dict__.update(name="lossy", vocab_size=259, lossless=False),
    )
    load_tokenizer(byte_config, 4096)
    assert "lossy changes text" in capfd.readouterr().err


def test_large_vocabularies_take_four_bytes(byte_config):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = 70_000
    assert load_corpus(byte_config, tokenizer).train.tokens.dtype == np.uint32


def test_what_was_done_is_said_in_one_line(byte_config, capfd):
    load_corpus(byte_config, ByteTokenizer())
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "41 of 42 documents" in lines[0] and "left out: 1 empty (e.g. " in lines[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("validation_fraction", 1.0),
        ("validation_fraction", -0.1),
        ("packing", "tight"),
        ("num_workers", -1),
        ("on_bad_record", "ignore"),
    ],
)
def test_a_bad_option_is_named_with_its_value(key, value):
    with pytest.raises(UserError, match=rf"data\.{key}={value}(: unknown choice| must)"):
        DataConfig(**{key: value})


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's peak memory")
def test_memory_does_not_grow_with_the_file(tmp_path, cache_home):
    code = (
        "import sys; from fp4zoo.data import *; shape = {'batch_size': 8, 'sequence_length': 512}; "
        "config = DataConfig(path=sys.argv[1], tokenizer='bytes'); "
        "iterator = make_train_iterator(config, ByteTokenizer(), seed=0, **shape); "
        "[next(iterator) for _ in range(100)]; "
        "print(open('/proc/self/status').read().split('RssAnon:')[1].split()[0])"
    )
    kilobytes = []
    for number in (10_000, 100_000):  # documents of 2 KB
        path = tmp_path / f"{number}.jsonl"
        with open(path, "w") as file:
            for index in range(number):
                file.write(json.dumps({"text": f"{index} " * 300}) + "\n")
        command = [sys.executable, "-c", code, str(path)]
        kilobytes.append(int(subprocess.check_output(command, text=True)))
    assert path.stat().st_size > 150e6
    assert kilobytes[1] - kilobytes[0] < 30_000, kilobytes
