"""Prepared folders that were changed, mixed up, cut short by a full disk or a killed process."""

import dataclasses
import json
import shutil
import subprocess
import sys
import time

import pytest

from fp4zoo.data import ByteTokenizer, DataConfig, load_corpus, make_train_iterator
from fp4zoo.data.prepare import prepare
from fp4zoo.errors import UserError

SHAPE = {"batch_size": 4, "sequence_length": 64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda manifest: manifest["train"].update(tokens=5), "is damaged or was changed"),
        (lambda manifest: manifest.update(dtype="<u4"), "is damaged or was changed"),
        (lambda manifest: manifest.pop("config"), "is damaged or was changed"),
        (lambda manifest: manifest.update(shards=[]), "is damaged or was changed"),
        (lambda manifest: manifest.update(format=99), r"by another version \(format 99, this one"),
    ],
)
def test_a_manifest_changed_by_hand_is_refused(jsonl, tmp_path, change, message):
    folder = tmp_path / "x"
    prepare(jsonl, folder, num_processes=1)
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=message):
        load_corpus(DataConfig(path=str(folder)), ByteTokenizer())


def test_tokens_and_starts_damaged_within_are_named(jsonl, tmp_path):
    """Beyond the ends, which the manifest knows."""
    folder = tmp_path / "x"
    prepare(jsonl, folder, num_processes=1)
    config = DataConfig(path=str(folder), shuffle=False)
    for name, message in (
        ("train.starts.npy", "starts.npy is damaged: remove"),
        ("train.tokens", r"x holds the token 65535, but the tokenizer has 259: the files are dam"),
    ):
        file = folder / "00000" / name
        content = file.read_bytes()
        file.write_bytes(content[:5000] + b"\xff" * 16 + content[5016:])
        with pytest.raises(UserError, match=message):
            iterator = make_train_iterator(config, ByteTokenizer(), seed=0, **SHAPE)
            for _ in range(20):
                next(iterator)
        file.write_bytes(content)


def test_a_shard_of_another_preparation_is_written_again(jsonl, tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    whole = prepare(jsonl, ours, shard_megabytes=1, num_processes=1)
    prepare(
        dataclasses.replace(jsonl, document_end="none"), theirs, shard_megabytes=1, num_processes=1
    )
    (ours / "manifest.json").unlink()
    shutil.rmtree(ours / "00001")
    shutil.copytree(theirs / "00001", ours / "00001")
    assert prepare(jsonl, ours, shard_megabytes=1, num_processes=1) == whole


def test_another_chat_template_in_the_middle_is_refused(tmp_path, cache_home, monkeypatch):
    (tmp_path / "x.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n' * 4)
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    config = DataConfig(
        path=str(tmp_path / "x.jsonl"),
        format="chat",
        chat_template=str(template),
        tokenizer="bytes",
        validation_fraction=0,
    )
    folder = tmp_path / "prepared"
    prepare(config, folder, num_processes=1)
    plain = DataConfig(path=str(folder), format="chat", chat_template=str(template))
    load_corpus(plain, ByteTokenizer())
    template.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    with pytest.raises(UserError, match="was begun with another chat template"):
        prepare(config, folder, num_processes=1)
    with pytest.raises(UserError, match="was prepared with another chat template than data.chat"):
        load_corpus(plain, ByteTokenizer())


def test_a_full_disk_names_the_folder(jsonl, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    for module in ("shard_jobs.write_shard", "prepare.write_manifest"):
        with monkeypatch.context() as patched:
            patched.setattr(f"fp4zoo.data.{module}", full)
            with pytest.raises(UserError, match=r"cannot write .*x \(No space.*: name a folder"):
                prepare(jsonl, tmp_path / "x", num_processes=1)


def test_a_prepared_folder_is_not_read_as_text(jsonl, tmp_path):
    folder = tmp_path / "texts" / "x"
    prepare(jsonl, folder, num_processes=1)
    for path in (folder.parent, folder.parent / "*" / "*" / "*"):
        with pytest.raises(UserError, match=r"\.tokens belongs to a prepared folder: name that"):
            load_corpus(DataConfig(path=str(path), tokenizer="bytes"), ByteTokenizer())


def test_processes_end_when_their_parent_is_killed(jsonl, tmp_path):
    arguments = [str(tmp_path / "x"), f"data.path={jsonl.path}", "data.tokenizer=bytes"]
    arguments += ["data.on_bad_record=skip", "--shard-megabytes=1", "--processes=2"]
    code = "import os, sys; from fp4zoo.data import prepare, shard_jobs\n"
    # A worker says who it is, and the parent is killed while its workers wait for work.
    code += (
        "def write(job, num_threads):\n"
        "    (job.folder / f'{os.getpid()}.pid').touch()\n"
        "    import time; time.sleep(60)\n"
        "shard_jobs._write_shard = write\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(prepare.main(sys.argv[1:]))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    with subprocess.Popen([sys.executable, str(script), *arguments]) as parent:
        wait_until(lambda: len(list((tmp_path / "x").glob("*.pid"))) == 2)
        workers = [int(path.stem) for path in (tmp_path / "x").glob("*.pid")]
        parent.kill()
    wait_until(lambda: not any(is_alive(worker) for worker in workers))


def wait_until(condition, seconds=30):
    for _ in range(seconds * 20):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail(f"not within {seconds} s")


def is_alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
