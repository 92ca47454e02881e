"""From a configuration to token files: the tokenizer and the two token streams, each made once.

    corpora/<key>/manifest.json
    corpora/<key>/{train,validation}.tokens        ids, little-endian uint16 or uint32
    corpora/<key>/{train,validation}.starts.npy    int64 [documents + 1], where each document begins
    corpora/<key>/{train,validation}.names         one document's name, as JSON, a line
    tokenizers/<key>/tokenizer.model

A stream holds every document's tokens followed by one end-of-document token. The key hashes
whatever determines the content: the source's files (name, size, time) or the Python version, the
tokenizer, the split, the way of reading. So nothing stale is ever read.
"""

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from .cache import cache_directory, discard, hash_of, publish
from .config import DataConfig
from .documents import Document, ReadReport, Source, kept_documents, split_threshold
from .files import FileSource
from .progress import byte_progress, note
from .sentencepiece_tokenizer import train_sentencepiece
from .standard_library import StandardLibrarySource
from .tokenizer import SENTENCEPIECE_FILE, Tokenizer, check_vocabulary, load_tokenizer_file

_FORMAT = 1  # raise it when files of the same key would differ
_SPLITS = ("train", "validation")
_SAMPLE_BYTES = 4_000_000
_SAMPLE_BYTES_PER_DOCUMENT = 200_000
_LARGEST_TRAINED_VOCABULARY = 32_768
_BATCH_BYTES = 4_000_000


@dataclass(frozen=True)
class TokenStream:
    """One split's tokens: every document's, each followed by the end-of-document token.

    Attributes:
      tokens: [N] memory-mapped uint16 or uint32 ids.
      starts: int64 [D + 1]: document d is tokens[starts[d] : starts[d + 1]].
      start_id, pad_id: what a document begins with when it is packed, and what fills rows.
    """

    tokens: np.ndarray
    starts: np.ndarray
    start_id: int
    pad_id: int


@dataclass(frozen=True)
class Corpus:
    """The tokenised corpus of a configuration.

    Attributes:
      description: for messages.
      digest: a hash of the tokens' content: the documents in order, the tokenizer, the split. It is
        the same wherever and whenever the files were written.
      train, validation: the streams; validation has no tokens when the fraction is 0.
      manifest: what was read, kept, dropped and counted.
      directory: where the files lie.
    """

    description: str
    digest: str
    train: TokenStream
    validation: TokenStream
    manifest: dict[str, Any]
    directory: Path


def open_source(config: DataConfig) -> Source:
    """The documents that `config.path` names; None is the standard library.

    Raises:
      UserError: nothing there or not readable.
    """
    if config.path is None:
        return StandardLibrarySource()
    return FileSource(config.path, field=config.field, on_bad_record=config.on_bad_record)


def load_tokenizer(config: DataConfig, vocab_size: int) -> Tokenizer:
    """The configured tokenizer, checked against the model's vocabulary.

    None trains SentencePiece (BPE, lossless) on 4 MB of the training split, chosen by content hash,
    for min(vocab_size, 32768) tokens, once: the model is cached.

    Args:
      config: the data configuration.
      vocab_size: the model's.

    Raises:
      UserError: no such file, not a tokenizer, more tokens than the model has, or no text to train
        on.
    """
    if config.tokenizer is not None:
        tokenizer = load_tokenizer_file(config.tokenizer)
        check_vocabulary(tokenizer, vocab_size)
        if not tokenizer.lossless:
            note(
                f"data: the tokenizer {tokenizer.name} changes text (a prefix, normalisation or "
                "unknown characters), so bits per byte is approximate"
            )
        return tokenizer
    source = open_source(config)
    vocab_size = min(vocab_size, _LARGEST_TRAINED_VOCABULARY)
    key = hash_of(
        format=_FORMAT,
        source=source.fingerprint(),
        vocab_size=vocab_size,
        validation_fraction=config.validation_fraction,
        sample=(_SAMPLE_BYTES, _SAMPLE_BYTES_PER_DOCUMENT),
    )
    entry = cache_directory(config.cache_dir) / "tokenizers" / key
    file = entry / SENTENCEPIECE_FILE
    if not file.is_file():
        began = time.perf_counter()
        texts = _tokenizer_sample(source, config.validation_fraction)
        model = train_sentencepiece(texts, vocab_size)
        with publish(entry) as directory:
            (directory / SENTENCEPIECE_FILE).write_bytes(model)
        note(
            f"data: trained SentencePiece on {source.description} in "
            f"{time.perf_counter() - began:.1f} s: {file}"
        )
    tokenizer = load_tokenizer_file(file)
    tokenizer.name = f"SentencePiece for {source.description}"
    return tokenizer


def load_corpus(config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """The token streams of `config`, tokenised now if they are not in the cache.

    Raises:
      UserError: a file is unreadable or holds a bad record, there is no text, or too little of it
        for a validation split.
    """
    source = open_source(config)
    key = hash_of(
        format=_FORMAT,
        source=source.fingerprint(),
        tokenizer=tokenizer.fingerprint,
        end=tokenizer.eos_id,
        validation_fraction=config.validation_fraction,
    )
    entry = cache_directory(config.cache_dir) / "corpora" / key
    manifest = _read_manifest(entry)
    if manifest is None:
        discard(entry)
        with publish(entry) as directory:
            _tokenize(config, source, tokenizer, directory)
        manifest = _read_manifest(entry)
        if manifest is None:
            raise UserError(f"{entry} was changed while it was written: remove it and start again")
    train, validation = (_open_stream(entry, split, manifest, tokenizer) for split in _SPLITS)
    return Corpus(source.description, manifest["digest"], train, validation, manifest, entry)


def available_cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _tokenizer_sample(source: Source, validation_fraction: float) -> Iterator[str]:
    """About `_SAMPLE_BYTES` of the training split's text, the same whenever it is asked for."""
    threshold = split_threshold(source, validation_fraction)
    chosen = round(2**64 * min(1.0, _SAMPLE_BYTES / max(1, source.total_bytes)))
    size = 0
    for document in kept_documents(source, ReadReport()):
        if document.split_hash >= threshold and document.sample_hash < chosen:
            text = document.text[:_SAMPLE_BYTES_PER_DOCUMENT]
            yield text
            size += len(text)
            if size > 2 * _SAMPLE_BYTES:  # compressed files hold more than their size says
                return


class _StreamWriter:
    """Appends documents to one split's files."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype, eos_id: int):
        self._tokens = open(directory / f"{split}.tokens", "wb")
        self._names = open(directory / f"{split}.names", "w", encoding="utf-8")
        self._starts_file = directory / f"{split}.starts.npy"
        self._dtype, self._end = dtype, np.array([eos_id], dtype)
        self._starts = [0]
        self.num_bytes = 0

    def append(self, document: Document, ids: np.ndarray) -> None:
        self._tokens.write(ids.astype(self._dtype).tobytes() + self._end.tobytes())
        self._names.write(json.dumps(document.name) + "\n")
        self._starts.append(self._starts[-1] + len(ids) + 1)
        self.num_bytes += len(document.content)

    def close(self) -> dict[str, int]:
        self._tokens.close()
        self._names.close()
        np.save(self._starts_file, np.array(self._starts, np.int64))
        return {
            "documents": len(self._starts) - 1,
            "tokens": self._starts[-1],
            "bytes": self.num_bytes,
        }


def _tokenize(config: DataConfig, source: Source, tokenizer: Tokenizer, directory: Path) -> None:
    began = time.perf_counter()
    threshold = split_threshold(source, config.validation_fraction)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    writers = [_StreamWriter(directory, split, dtype, tokenizer.eos_id) for split in _SPLITS]
    report = ReadReport()
    num_threads = available_cpus()
    digest = hashlib.blake2b(
        hash_of(tokenizer=tokenizer.fingerprint, threshold=threshold).encode(), digest_size=12
    )
    with byte_progress(f"Tokenising {source.description}", source.total_bytes) as advance:
        for batch in _batches(kept_documents(source, report)):
            texts = [document.text for document in batch]
            encoded = tokenizer.encode_batch(texts, num_threads=num_threads)
            for document, ids in zip(batch, encoded, strict=True):
                writers[document.split_hash < threshold].append(document, ids)
                digest.update(document.digest)
                advance(len(document.content))
    counts = {split: writer.close() for split, writer in zip(_SPLITS, writers, strict=True)}
    manifest = {
        "format": _FORMAT,
        "source": source.description,
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "digest": digest.hexdigest(),
        "config": dataclasses.asdict(config),
        "dtype": dtype.str,
        "read": report.as_dict(),
        **counts,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    _note_result(source, report, counts, time.perf_counter() - began)


def _note_result(
    source: Source, report: ReadReport, counts: dict[str, dict[str, int]], seconds: float
) -> None:
    dropped = ", ".join(
        f"{count} {reason} (e.g. {report.examples[reason]})"
        for reason, count in sorted(report.dropped.items())
    )
    train, validation = counts["train"], counts["validation"]
    num_bytes = train["bytes"] + validation["bytes"]
    num_tokens = train["tokens"] + validation["tokens"]
    note(
        f"data: tokenised {source.description} in {seconds:.1f} s: {report.kept:,} of "
        f"{report.read:,} documents, {num_bytes / 1e6:.1f} MB, {num_tokens:,} tokens; "
        f"validation {validation['documents']:,} documents, {validation['tokens']:,} tokens; "
        f"left out: {dropped or 'none'}"
    )


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in lists of about `_BATCH_BYTES`: work for every thread, memory for a few."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.content)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_manifest(entry: Path) -> dict[str, Any] | None:
    """The manifest if the entry is whole: present, readable, and its files of the right size."""
    try:
        manifest = json.loads((entry / "manifest.json").read_text())
        item_size = np.dtype(manifest["dtype"]).itemsize
        if not manifest["digest"]:
            return None
        for split in _SPLITS:
            expected = manifest[split]["tokens"] * item_size
            if (entry / f"{split}.tokens").stat().st_size != expected:
                return None
            if not (entry / f"{split}.starts.npy").is_file():
                return None
        return manifest
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _open_stream(
    entry: Path, split: str, manifest: dict[str, Any], tokenizer: Tokenizer
) -> TokenStream:
    dtype = np.dtype(manifest["dtype"])
    file = entry / f"{split}.tokens"
    if manifest[split]["tokens"]:
        # A plain array over the mapped memory: slicing a np.memmap costs five times as much.
        tokens = np.memmap(file, dtype, "r").view(np.ndarray)
    else:
        tokens = np.zeros(0, dtype)  # an empty file cannot be mapped
    starts = np.load(entry / f"{split}.starts.npy")
    return TokenStream(tokens, starts, tokenizer.start_id, tokenizer.pad_id)
