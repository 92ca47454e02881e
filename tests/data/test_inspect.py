"""What the inspection shows."""

import io
import json
import os
import re

import numpy as np
import pytest
from rich.console import Console

from fp4zoo.data import (
    ByteTokenizer,
    DataConfig,
    SourceConfig,
    load_corpus,
    load_tokenizer_file,
    make_train_iterator,
)
from fp4zoo.data.inspect import decoded_rows, fallback_share, length_histogram, main
from fp4zoo.data.sentencepiece_tokenizer import SentencePieceTokenizer, train_sentencepiece


def test_documents_have_borders_and_colours(byte_config):
    iterator = make_train_iterator(
        byte_config, ByteTokenizer(), batch_size=8, sequence_length=300, seed=0
    )
    batch = next(iterator)
    for row, targets, ids in zip(
        decoded_rows(batch, ByteTokenizer()), batch["targets"], batch["segment_ids"], strict=True
    ):
        pieces = re.split(r"¦\d+ ", row.plain)[1:]
        assert len(pieces) == ids.max() > 0
        for segment, piece in enumerate(pieces, 1):
            assert piece == ByteTokenizer().decode(targets[ids == segment].tolist())
        colours = {str(span.style) for span in row.spans if "reverse" not in str(span.style)}
        assert len(colours) == min(6, ids.max())


def test_what_is_not_trained_on_is_dim_and_padding_is_counted(tmp_path, cache_home):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "ask", "completion": "answer"}\n')
    config = DataConfig(path=str(path), format="prompt_completion", validation_fraction=0)
    iterator = make_train_iterator(
        config, ByteTokenizer(), batch_size=1, sequence_length=16, seed=0
    )
    (row,) = decoded_rows(next(iterator), ByteTokenizer())
    assert row.plain == "¦1 askanswer¦ 6 x padding"
    styles = {row.plain[span.start : span.end]: str(span.style) for span in row.spans}
    assert styles["ask"] == "dim green" and styles["answer"] == "green"


def test_histogram():
    assert length_histogram(np.array([3, 4, 4, 7, 40])) == [
        (2, 3, 1),
        (4, 7, 3),
        (8, 15, 0),
        (16, 31, 0),
        (32, 63, 1),
    ]
    assert length_histogram(np.array([], int)) == []


def test_fallback_tokens_are_counted_exactly(tmp_path, cache_home):
    tokenizer = SentencePieceTokenizer(train_sentencepiece(["plain words " * 400], 600), "x")
    path = tmp_path / "x.txt"
    path.write_text("plain words 語é ")
    corpus = load_corpus(DataConfig(path=str(path), validation_fraction=0), tokenizer)
    assert fallback_share(corpus, tokenizer) == pytest.approx(5 / len(corpus.train.tokens))


def test_the_command(text_directory, cache_home, tmp_path, capfd):
    sources = [
        {"path": str(text_directory), "weight": 3},
        {"path": str(tmp_path / "b.jsonl"), "weight": 1},
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(['{"text": "hello there"}'] * 9 + ['{"text": ""}']))
    settings = [f"data.sources={json.dumps(sources)}", "data.tokenizer=bytes"]
    settings += ["data.validation_fraction=0", "data.packing=best_fit"]
    assert main([*settings, "--rows=2", "--sequence-length=64", "--colour=always"]) == 0
    out, err = capfd.readouterr()
    assert "\x1b[" in out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert "row 1" in plain and "row 2" not in plain
    assert re.search(r"75\.00%", plain) and re.search(r"25\.00%", plain)
    assert re.search(r"8 - 15 +9 █", plain)
    assert "unknown or byte-fallback tokens: 0.0000%" in plain
    assert re.search(r"best_fit: \d+ rows, \d+\.\d\d% filled; 0\.0% of 9 documents cut", plain)
    assert "packed" in err
    assert main(["--rows", "0", "data.shuffle=false", *settings, "--colour=never"]) == 0
    out = capfd.readouterr().out
    assert "\x1b[" not in out and "row 0" not in out and "75.00%" in out


def test_mistakes_are_one_line(capfd):
    for arguments in (
        ["data.path=/nowhere"],
        ["data.pakcing=x"],
        ["--rows=-1"],
        ["data=chat"],
        ["--vocab-size=-3"],
    ):
        assert main(arguments) == 2
        err = capfd.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1


def test_wide_text_does_not_break_it(byte_config):
    source = SourceConfig(path=byte_config.path, weight=1)
    config = DataConfig(sources=(source,), tokenizer="bytes")
    iterator = make_train_iterator(config, ByteTokenizer(), batch_size=1, sequence_length=8, seed=0)
    console = Console(file=io.StringIO(), width=20)
    console.print(decoded_rows(next(iterator), ByteTokenizer())[0])
    assert "¦1" in console.file.getvalue()


def test_text_and_names_cannot_act_on_the_terminal(tmp_path, cache_home, capfd):
    path = tmp_path / "a\x1b[31m.jsonl"
    path.write_text(json.dumps({"text": "\x1b]0;title\x07 tab\t [bold]x[/bold] " * 9}))
    arguments = [f"data.path={path}", "data.tokenizer=bytes", "data.validation_fraction=0"]
    assert main([*arguments, "--rows=1", "--sequence-length=64"]) == 0
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err and r"\x1b]0;title\x07 tab" in out and "[bold]x[/bold]" in out


def test_narrow_terminals_and_plain_encodings(byte_config, tmp_path, monkeypatch):
    arguments = [f"data.path={byte_config.path}", "data.tokenizer=bytes", "--rows=1"]
    for width in ("20", "0"):
        monkeypatch.setenv("COLUMNS", width)
        with open(tmp_path / "out", "w", encoding="ascii") as file:
            monkeypatch.setattr("sys.stdout", file)
            assert main([*arguments, "--sequence-length=64"]) == 0
        written = (tmp_path / "out").read_text()
        assert "documents" in written and "100.00%" in written and r"\xa61" in written


def test_stdout_that_is_full_or_closed(monkeypatch, byte_config, cache_home, capfd):
    arguments = [f"data.path={byte_config.path}", "data.tokenizer=bytes", "--sequence-length=64"]
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(arguments) == 1
        assert capfd.readouterr().err.splitlines()[-1].startswith("error: [Errno 28]")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        assert main(arguments) == 0
    monkeypatch.setattr("sys.stdout", None)
    assert main(arguments) == 0
    assert "Traceback" not in capfd.readouterr().err


def test_special_tokens_are_shown(tmp_path, cache_home, chat_tokenizer_file):
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    (tmp_path / "x.jsonl").write_text(json.dumps(chat))
    config = DataConfig(path=str(tmp_path / "x.jsonl"), format="chat", validation_fraction=0)
    tokenizer = load_tokenizer_file(chat_tokenizer_file)
    iterator = make_train_iterator(config, tokenizer, batch_size=1, sequence_length=24, seed=0)
    row = decoded_rows(next(iterator), tokenizer)[0].plain
    assert row.startswith("¦1 <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>")
