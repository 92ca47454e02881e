"""Tokenising once into a folder that stands for the text."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from fp4zoo.data import ByteTokenizer, DataConfig, load_corpus, load_tokenizer, make_train_iterator
from fp4zoo.data.prepare import _alone_in, main, prepare
from fp4zoo.errors import UserError

SHAPE = {"batch_size": 4, "sequence_length": 64}


def shard_names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.isdigit())


def test_a_folder_gives_the_batches_of_its_source(jsonl, tmp_path):
    folder = tmp_path / "prepared"
    manifest = prepare(jsonl, folder, shard_megabytes=1, num_processes=1)
    assert len(shard_names(folder)) == len(manifest["shards"]) >= 3
    prepared = DataConfig(path=str(folder))
    tokenizer = load_tokenizer(prepared, 259)
    assert tokenizer.fingerprint == "bytes-1"
    first = make_train_iterator(jsonl, ByteTokenizer(), seed=0, **SHAPE)
    second = make_train_iterator(prepared, tokenizer, seed=0, **SHAPE)
    for _ in range(50):
        one, other = next(first), next(second)
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])
    second.set_state(first.get_state())  # the same data, so the same position
    whole = first.corpus
    assert whole.digest == second.corpus.digest == manifest["digest"]
    np.testing.assert_array_equal(
        np.asarray(second.corpus.validation.tokens), whole.validation.tokens
    )
    for key in ("read", "duplicates", "train", "validation"):
        assert manifest[key] == whole.manifest[key]
    assert manifest["read"]["dropped"] == {"not JSON": 1, "empty": 1}
    assert manifest["duplicates"]["repeated"] == 1
    names = "".join((folder / name / "train.names").read_text() for name in shard_names(folder))
    assert names == (whole.directory / "train.names").read_text()


def test_processes_write_the_same(jsonl, tmp_path):
    one = prepare(jsonl, tmp_path / "one", shard_megabytes=1, num_processes=1)
    two = prepare(jsonl, tmp_path / "two", shard_megabytes=1, num_processes=2)
    assert one == two
    for name in shard_names(tmp_path / "one"):
        for file in (tmp_path / "one" / name).iterdir():
            assert file.read_bytes() == (tmp_path / "two" / name / file.name).read_bytes()


def test_an_interrupted_command_goes_on(jsonl, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "prepared"
    whole = prepare(jsonl, tmp_path / "whole", shard_megabytes=1, num_processes=1)
    written = []

    def stop_at_the_third(job, num_threads):
        if len(written) == 2:
            (folder / f"{job.name}.partial-left").mkdir()
            raise KeyboardInterrupt
        written.append(job.name)
        return original(job, num_threads)

    from fp4zoo.data import shard_jobs as module

    original = module._write_shard
    monkeypatch.setattr(module, "_write_shard", stop_at_the_third)
    arguments = [
        *(str(folder), f"data.path={jsonl.path}", "data.tokenizer=bytes"),
        *("data.on_bad_record=skip", "--shard-megabytes=1", "--processes=1"),
    ]
    assert main(arguments) == 130
    assert shard_names(folder) == written == ["00000", "00001"]
    with pytest.raises(UserError, match=r"unfinished prepared folder: give the same"):
        load_corpus(DataConfig(path=str(folder)), ByteTokenizer())
    monkeypatch.setattr(module, "_write_shard", original)
    before = (folder / "00000" / "train.tokens").stat().st_mtime_ns
    capfd.readouterr()
    assert main(arguments) == 0
    out, err = capfd.readouterr()
    assert f"2 of {len(whole['shards'])} shards of {folder} are there already" in err
    assert whole["digest"] in out
    assert (folder / "00000" / "train.tokens").stat().st_mtime_ns == before
    assert not list(folder.glob("*.partial-*"))
    assert json.loads((folder / "manifest.json").read_text())["digest"] == whole["digest"]


def test_once_is_enough(jsonl, tmp_path, monkeypatch):
    manifest = prepare(jsonl, tmp_path / "x", num_processes=1)
    monkeypatch.setattr("fp4zoo.data.shard_jobs._write_shard", None)
    assert prepare(jsonl, tmp_path / "x", num_processes=1) == manifest


def test_a_trained_tokenizer_lies_in_the_folder(jsonl, tmp_path):
    config = dataclasses.replace(jsonl, tokenizer=None, tokenizer_type="unigram")
    prepare(config, tmp_path / "x", vocab_size=600, num_processes=1)
    tokenizer = load_tokenizer(DataConfig(path=str(tmp_path / "x")), 4096)
    assert tokenizer.vocab_size <= 600
    expected = load_tokenizer(dataclasses.replace(config, tokenizer_vocab_size=600), 4096)
    assert tokenizer.fingerprint == expected.fingerprint
    with pytest.raises(UserError, match=r"tokens but the model only 300: set model\.vocab_size"):
        load_tokenizer(DataConfig(path=str(tmp_path / "x")), 300)


def test_what_was_settled_cannot_be_changed(jsonl, tmp_path):
    config = dataclasses.replace(jsonl, validation_fraction=0.1, document_end="none")
    folder = tmp_path / "x"
    prepare(config, folder, num_processes=1)
    plain = DataConfig(path=str(folder))
    for change in ({}, {"validation_fraction": 0.1}, {"document_end": "none"}):
        load_corpus(dataclasses.replace(plain, **change), ByteTokenizer())
    for change, message in (
        ({"validation_fraction": 0.2}, r"prepared with validation_fraction=0\.1 but this run has"),
        ({"format": "chat"}, r"prepared with format=text but this run has data\.format=chat"),
        ({"document_start": "none"}, r"document_start=auto but this run has data\.document_start"),
        ({"field": "body"}, r"prepared with field=text but this run has data\.field=body"),
        ({"tokenizer_type": "unigram"}, r"prepared with tokenizer_type=bpe but this run has"),
        (
            {"format": "chat", "chat_template": "t"},
            r"prepared with format=text but this run has data\.format=chat",
        ),
    ):
        with pytest.raises(UserError, match=message):
            load_corpus(dataclasses.replace(plain, **change), ByteTokenizer())
    other = ByteTokenizer()
    other.fingerprint = "other"
    with pytest.raises(UserError, match=r"prepared with another tokenizer \(bytes\) than bytes"):
        load_corpus(plain, other)


def test_prepared_folders_in_a_mixture(jsonl, tmp_path, text_directory):
    prepare(jsonl, tmp_path / "x", shard_megabytes=1, num_processes=1)
    sources = (
        {"path": str(tmp_path / "x"), "weight": 1},
        {"path": str(text_directory), "weight": 1},
    )
    config = DataConfig(sources=sources, validation_fraction=0.02)
    tokenizer = load_tokenizer(config, 259)
    iterator = make_train_iterator(config, tokenizer, seed=0, **SHAPE)
    rows = np.concatenate([next(iterator)["targets"] for _ in range(50)])
    assert (rows == ord("-")).any(axis=1).mean() == pytest.approx(0.5, abs=0.06)
    (tmp_path / "x" / "tokenizer" / "tokenizer.bytes").unlink()
    with pytest.raises(UserError, match="no tokenizer in"):
        load_tokenizer(config, 259)


def test_a_vocabulary_too_large_for_the_model_names_the_option(jsonl, tmp_path):
    prepare(jsonl, tmp_path / "x", num_processes=1)
    with pytest.raises(UserError, match="or prepare the text into another folder with --vocab-siz"):
        load_tokenizer(DataConfig(path=str(tmp_path / "x")), 128)


@pytest.mark.parametrize("damage", ["shard", "manifest"])
def test_a_damaged_folder_is_named(jsonl, tmp_path, damage):
    folder = tmp_path / "x"
    prepare(jsonl, folder, shard_megabytes=1, num_processes=1)
    if damage == "shard":
        shutil.rmtree(folder / "00001")
    else:
        (folder / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="is damaged or was changed: remove it and"):
        load_corpus(DataConfig(path=str(folder)), ByteTokenizer())


def test_mistakes_are_one_line(jsonl, tmp_path, capfd):
    path = f"data.path={jsonl.path}"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    done = tmp_path / "done"
    prepare(jsonl, done, num_processes=1)
    for arguments, message in (
        ([str(tmp_path / "x"), "data.paht=x"], "unknown key 'data.paht': did you mean"),
        ([str(tmp_path / "x"), path, "--processes=0"], "--processes=0: give 1 or more"),
        ([str(tmp_path / "full"), path, "data.tokenizer=bytes"], "is not an empty folder"),
        ([str(done), path, "data.tokenizer=bytes"], "preparation (other data.on_bad_record)"),
        ([str(tmp_path / "x"), f"data.path={done}"], "is prepared already"),
        ([str(tmp_path / "x"), path, "data.tokenizer=bytes"], "x.jsonl:1001: the line is not JSON"),
        ([str(tmp_path / "y"), path, "data.format=chat", "data.tokenizer=bytes"], "chat template"),
        ([str(tmp_path / "z"), "data.sources=[]"], "data.sources=[]: expected a list"),
        ([str(tmp_path / "full" / "z"), f"data.path={tmp_path / 'full'}"], "is inside data.path="),
        (
            [str(tmp_path / "z"), "data.sources=[{path: a, weight: 1}]"],
            "prepare each source into a folder",
        ),
    ):
        capfd.readouterr()
        assert main(arguments) == 2
        err = capfd.readouterr().err
        assert message in err and err.startswith("error: ") and err.count("\n") == 1, err


def test_a_source_that_changes_meanwhile_is_refused(jsonl, tmp_path, monkeypatch):
    from fp4zoo.data import shard_jobs as module

    original = module._write_shard

    def change_and_write(job, num_threads):
        with open(jsonl.path, "a") as file:
            file.write('{"text": "more"}\n')
        return original(job, num_threads)

    monkeypatch.setattr(module, "_write_shard", change_and_write)
    with pytest.raises(UserError, match=r"x\.jsonl changed while it was read"):
        prepare(jsonl, tmp_path / "x", num_processes=1)


def test_the_remedy_of_a_bad_record_works_in_the_same_folder(jsonl, tmp_path, capfd):
    """And options may stand between settings."""
    folder = str(tmp_path / "prepared")
    settings = [f"data.path={jsonl.path}", "--processes", "1", "data.tokenizer=bytes"]
    assert main([folder, *settings]) == 2
    assert "set data.on_bad_record=skip" in capfd.readouterr().err
    assert main([folder, *settings, "data.on_bad_record=skip"]) == 0


def test_overwritten_tokens_are_seen_and_written_again(jsonl, tmp_path):
    folder = tmp_path / "prepared"
    prepare(jsonl, folder, shard_megabytes=1, num_processes=1)
    tokens = folder / shard_names(folder)[1] / "train.tokens"
    content = tokens.read_bytes()
    tokens.write_bytes(b"\xff" * len(content))
    with pytest.raises(UserError, match="is damaged or was changed"):
        load_corpus(DataConfig(path=str(folder)), ByteTokenizer())
    prepare(jsonl, folder, shard_megabytes=1, num_processes=1)
    assert tokens.read_bytes() == content


@pytest.mark.parametrize("name", ["plan.json", "manifest.json", "00001/shard.json"])
@pytest.mark.parametrize("content", ["garbage", "[]", "{}"])
def test_damaged_notes_are_one_line_or_written_again(jsonl, tmp_path, name, content):
    folder = tmp_path / "prepared"
    manifest = prepare(jsonl, folder, shard_megabytes=1, num_processes=1)
    (folder / name).write_text(content)
    if name == "plan.json":
        with pytest.raises(UserError, match="holds another preparation"):
            prepare(jsonl, folder, shard_megabytes=1, num_processes=1)
        return
    assert (
        prepare(jsonl, folder, shard_megabytes=1, num_processes=1)["digest"] == manifest["digest"]
    )


def test_two_commands_do_not_share_a_folder(jsonl, tmp_path):
    folder = tmp_path / "prepared"
    with _alone_in(folder):
        with pytest.raises(UserError, match="another process is preparing"):
            prepare(jsonl, folder, shard_megabytes=1, num_processes=1)
    assert not folder.exists()  # nothing was left in it
