"""Every document that is read is trained on, held out, or counted as dropped with its reason."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from array_record.python import array_record_module

from fp4zoo.data import ByteTokenizer, DataConfig, load_corpus, make_train_iterator
from fp4zoo.data.inspect import main as inspect_main
from fp4zoo.errors import UserError

GOOD = 60  # of each file


@pytest.fixture
def everything(tmp_path):
    """A directory with a file of every kind, each with good and bad records; what is to be kept
    and dropped."""
    directory = tmp_path / "everything"
    directory.mkdir()
    texts = {
        kind: [f"{kind} {number} " + "word " * number for number in range(GOOD)]
        for kind in ("plain", "gzip", "zstandard", "parquet", "array")
    }

    def jsonl(kind):
        lines = [json.dumps({"text": text}).encode() for text in texts[kind]]
        bad = [b"{no", b'{"body": 1}', b'{"text": "\xff"}', b'{"text": ""}', b'{"text": "\\ud800"}']
        return b"\n".join([*lines[:30], *bad, b"", *lines[30:]])

    (directory / "a.jsonl").write_bytes(jsonl("plain"))
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(jsonl("gzip")))
    (directory / "c.ndjson.zst").write_bytes(zstandard.compress(jsonl("zstandard")))
    column = pyarrow.array([*texts["parquet"], None, ""])
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), directory / "d.parquet")
    writer = array_record_module.ArrayRecordWriter(str(directory / "e.array_record"), "")
    for text in [*texts["array"], ""]:
        writer.write(text.encode())
    writer.write(b"\xff\xfe")
    writer.close()
    (directory / "f.txt").write_text("text in a file")
    (directory / "g.txt").write_bytes(b"caf\xe9")
    (directory / "h.txt").write_bytes(b"")
    kept = [text for kind in texts.values() for text in kind] + ["text in a file"]
    dropped = {
        "not JSON": 3,
        "no text field": 3 + 1,
        "not UTF-8": 6 + 1 + 1,
        "empty": 3 + 1 + 1 + 1,
    }
    return DataConfig(path=str(directory), on_bad_record="skip"), kept, dropped


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_it_all_adds_up(everything, cache_home, packing):
    config, kept, dropped = everything
    config = DataConfig(config.path, packing=packing, on_bad_record="skip", validation_fraction=0.1)
    tokenizer = ByteTokenizer()
    iterator = make_train_iterator(config, tokenizer, batch_size=1, sequence_length=64, seed=0)
    manifest = iterator.corpus.manifest
    read = manifest["read"]
    assert read["dropped"] == dropped and read["kept"] == len(kept)
    assert read["read"] == read["kept"] + sum(read["dropped"].values())
    counts = [manifest[split] for split in ("train", "validation")]
    assert sum(count["documents"] for count in counts) == read["kept"]
    assert sum(count["bytes"] for count in counts) == sum(len(text.encode()) for text in kept)

    # An epoch trains on every token of every kept document that is not held out.
    targets = np.concatenate(
        [
            batch["targets"][batch["loss_mask"] > 0]
            for batch in (next(iterator) for _ in range(iterator.rows_per_epoch))
        ]
    )
    held_out = tokenizer.decode(iterator.corpus.validation.tokens.tolist())
    expected = [text for text in kept if text not in held_out]
    everything_but_ends = np.sort(targets[targets != tokenizer.eos_id])
    np.testing.assert_array_equal(
        everything_but_ends, np.sort(np.frombuffer("".join(expected).encode(), np.uint8))
    )
    assert (targets == tokenizer.eos_id).sum() == len(expected) == counts[0]["documents"]


def test_what_is_dropped_is_reported_with_examples(everything, cache_home, capfd):
    config, _, _ = everything
    load_corpus(config, ByteTokenizer())
    line = capfd.readouterr().err
    assert "301 of 322 documents" in line and line.count("\n") == 1
    for reason in ("6 empty (e.g. ", "3 not JSON (e.g. ", "8 not UTF-8 (e.g. ", "4 no text field"):
        assert reason in line
    assert "a.jsonl:31)" in line
    assert inspect_main([f"data.path={config.path}", "data.on_bad_record=skip",
                         "data.tokenizer=bytes", "--colour=never"]) == 0  # fmt: skip
    assert "21" in capfd.readouterr().out


def test_by_default_the_first_bad_record_is_an_error(everything, cache_home):
    with pytest.raises(UserError, match=r"a\.jsonl:31: the line is not JSON.*on_bad_record=skip"):
        load_corpus(DataConfig(everything[0].path), ByteTokenizer())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"x\.jsonl holds no text: set data\.path to a file with text"),
        ('{"text": ""}\n\n', r"x\.jsonl holds no text"),
        ('{"text": "one"}\n{"text": "one"}', r"holds one distinct document, too few for a val"),
    ],
)
def test_nothing_to_train_on(tmp_path, cache_home, content, message):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        load_corpus(DataConfig(str(tmp_path / "x.jsonl")), ByteTokenizer())


def test_documents_equal_but_for_whitespace_on_both_sides_are_counted(tmp_path, cache_home):
    lines = [json.dumps({"text": " " * number + "same words"}) for number in range(200)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    config = DataConfig(str(tmp_path / "x.jsonl"), validation_fraction=0.2)
    manifest = load_corpus(config, ByteTokenizer()).manifest
    assert manifest["duplicates"]["repeated"] == 0
    assert manifest["duplicates"]["across_splits"] == manifest["train"]["documents"] < 200
