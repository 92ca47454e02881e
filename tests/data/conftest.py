import numpy as np
import pytest

from fp4zoo.data import DataConfig, TokenStream


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
