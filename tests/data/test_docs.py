"""Every command of docs/data.md, on files of the names that it uses."""

import json
import shlex
from pathlib import Path

import pytest

from fp4zoo import configs
from fp4zoo.data import (
    inspect,
    load_tokenizer,
    make_train_iterator,
    make_validation_batches,
    prepare,
)

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "data.md"
COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines()
    if line.startswith("    python ")
]


@pytest.fixture
def files(tmp_path, cache_home, monkeypatch, chat_tokenizer_file):
    """The files that the document names, in the current directory."""
    monkeypatch.chdir(tmp_path)
    text = "\n".join(f"line {number} of some text, which goes on" for number in range(6000))
    Path("corpus.txt").write_text(text)
    Path("a.txt").write_text(text.upper())
    lines = {
        "b.jsonl": {"body": "one of many", "text": "one"},
        "pairs.jsonl": {"prompt": "what is one? ", "completion": "this"},
        "chats.jsonl": {"messages": [{"role": "user", "content": "hi, one"}]},
    }
    lines["chats.jsonl"]["messages"].append({"role": "assistant", "content": "hello"})
    for name, record in lines.items():
        with open(name, "w") as file:
            for number in range(3000):
                file.write(json.dumps(record).replace("one", str(number)) + "\n")
    Path("DIRECTORY").symlink_to(chat_tokenizer_file.parent)
    return tmp_path


def test_there_are_commands():
    assert len(COMMANDS) > 8


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_command(files, command, capfd):
    if "data.path=prepared" in command:
        assert prepare.main(["prepared", "data.path=corpus.txt", "--vocab-size=4096"]) == 0
    if command[0] == "-m":
        module = {"fp4zoo.data.prepare": prepare, "fp4zoo.data.inspect": inspect}[command[1]]
        assert module.main(command[2:]) == 0
        assert capfd.readouterr().out
        return
    assert command[0] == "train.py"
    config = configs.load(command[1:])
    if config.data.path is None and not config.data.sources:
        return  # the default corpus: test_the_default_corpus_from_nothing
    tokenizer = load_tokenizer(config.data, config.model.vocab_size)
    shape = {"batch_size": 2, "sequence_length": config.sequence_length}
    batch = next(make_train_iterator(config.data, tokenizer, seed=config.seed, **shape))
    assert 0 < batch["loss_mask"].sum() <= batch["tokens"].size
    make_validation_batches(config.data, tokenizer, **shape, max_batches=2)
