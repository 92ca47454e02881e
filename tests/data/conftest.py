import json

import numpy as np
import pytest
import tokenizers

from fp4zoo.data import DataConfig, TokenStream

CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def cache_home(tmp_path, monkeypatch):
    """An empty cache directory for this test alone."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("FP4ZOO_CACHE", str(directory))
    return directory


@pytest.fixture
def text_directory(tmp_path):
    """Forty text files of unequal length, some with the same content, one empty."""
    directory = tmp_path / "texts"
    directory.mkdir()
    for number in range(40):
        words = [f"word{number}-{index}" for index in range(3 + 7 * (number % 11))]
        (directory / f"file{number:02d}.txt").write_text("\n".join(words))
    (directory / "copy.txt").write_text((directory / "file03.txt").read_text())
    (directory / "empty.txt").write_text("")
    return directory


@pytest.fixture
def byte_config(cache_home, text_directory):
    """The text files in bytes, with a fifth of them for validation."""
    return DataConfig(path=str(text_directory), tokenizer="bytes", validation_fraction=0.2)


@pytest.fixture
def stream():
    """A stream of ragged documents, and those documents: ids from 10, end 2, start 1, padding 0."""
    generator = np.random.default_rng(0)
    lengths = [5, 1, 17, 40, 3, 8, 8, 1, 2, 29]
    documents = [generator.integers(10, 1000, length) for length in lengths]
    tokens = np.concatenate([np.append(document, 2) for document in documents]).astype(np.uint16)
    starts = np.cumsum([0] + [length + 1 for length in lengths])
    return TokenStream(tokens, starts, start_id=1, pad_id=0), documents


@pytest.fixture(scope="session")
def chat_tokenizer_file(tmp_path_factory):
    """A byte-level tokenizer.json with the ChatML tokens and template."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello goodbye assistant user system"], trainer)
    directory = tmp_path_factory.mktemp("chat")
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory / "tokenizer.json"


@pytest.fixture
def jsonl(tmp_path, cache_home):
    """Three megabytes of JSONL with a bad line, an empty one and a repeated one."""
    generator = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "é", "語"]
    lines = [
        json.dumps({"text": f"{number} " + " ".join(generator.choice(words, 120))})
        for number in range(4000)
    ]
    lines[1000] = "{broken"
    lines[2000] = '{"text": ""}'
    lines[3999] = lines[0]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return DataConfig(path=str(path), tokenizer="bytes", on_bad_record="skip")
