"""From a configuration to token streams, each source tokenised once.

    corpora/<key>/manifest.json, and the files that streams.py lists, as one shard

The key hashes whatever determines the content: the source's files (name, size, time) or the Python
version, the tokenizer, the split, the way of reading. So nothing stale is ever read. A folder that
prepare.py wrote is the same in many shards. Whatever the source's size, memory holds some megabytes
of its text and about 30 bytes per document.
"""

import dataclasses
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from .cache import cache_directory, discard, hash_of, publish
from .chat import load_chat_template
from .config import DataConfig
from .documents import ReadReport, Source, split_threshold
from .encoding import DocumentEncoder, start_id
from .manifest import (
    FORMAT,
    TOKENIZER_FOLDER,
    count_duplicates,
    load_hashes,
    make_manifest,
    read_manifest,
    why_unusable,
    write_manifest,
)
from .progress import byte_progress, note
from .shards import token_dtype, write_shard
from .sources import open_source, prepared_folder
from .streams import SPLITS, TokenStream, join_streams, open_stream
from .tokenizer import Tokenizer
from .tokenizer_files import load_tokenizer_file

_WHOLE_FILES = 1 << 62  # bytes in a unit
# What a prepared folder has settled: a configuration may leave it at its default or say the same.
_SETTLED = (
    "format",
    "field",
    "document_end",
    "validation_fraction",
    "tokenizer_type",
    "tokenizer_vocab_size",
)


@dataclass(frozen=True)
class Corpus:
    """The tokenised corpus of a configuration.

    Attributes:
      description: for messages.
      digest: a hash of the tokens' content: the documents in order, the tokenizer, the split. It is
        the same wherever and whenever the files were written.
      train, validation: the streams; validation has no tokens when the fraction is 0. Of a mixture,
        all sources end to end.
      manifest: what was read, kept, dropped and counted; of a mixture, {"sources": [manifests]} and
        the sums.
      directory: where the files lie; of a mixture, those of the first source.
      parts: the corpus of each source of a mixture; empty otherwise.
    """

    description: str
    digest: str
    train: TokenStream
    validation: TokenStream
    manifest: dict[str, Any]
    directory: Path
    parts: tuple["Corpus", ...] = ()


def load_corpus(config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """The token streams of `config`, tokenised now if they are not in the cache.

    Raises:
      UserError: a file is unreadable or holds a bad record, there is no text, or too little of it
        for a validation split.
    """
    parts = tuple(_load_source(single, tokenizer) for single in config.single())
    if len(parts) == 1:
        return parts[0]
    hashes = {
        split: np.concatenate(
            [load_hashes(part.directory, part.manifest["shards"], split) for part in parts]
        )
        for split in SPLITS
    }
    manifest = {
        "sources": [part.manifest for part in parts],
        "duplicates": count_duplicates(hashes),
        **{
            split: {
                key: sum(part.manifest[split][key] for part in parts)
                for key in parts[0].manifest[split]
            }
            for split in SPLITS
        },
    }
    shares = [[source.weight, source.epochs] for source in config.sources or ()]
    return Corpus(
        f"a mixture of {', '.join(part.description for part in parts)}",
        hash_of(parts=[part.digest for part in parts], shares=shares),
        join_streams([part.train for part in parts]),
        join_streams([part.validation for part in parts]),
        manifest,
        parts[0].directory,
        parts,
    )


def available_cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def about_corpus(
    config: DataConfig,
    source: Source,
    tokenizer: Tokenizer,
    encoder: DocumentEncoder,
    threshold: int,
) -> dict[str, Any]:
    """What a manifest says beside counts."""
    return {
        "source": source.description,
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "settings": {
            "tokenizer": tokenizer.fingerprint,
            "threshold": threshold,
            **encoder.settings(),
        },
        "config": dataclasses.asdict(config),
        "dtype": token_dtype(tokenizer.vocab_size).str,
    }


def describe_result(manifest: dict[str, Any], seconds: float) -> str:
    """One line: what was read, kept, left out, held out and found twice."""
    report = ReadReport.from_dict(manifest["read"])
    train, validation = manifest["train"], manifest["validation"]
    dropped = ", ".join(
        f"{count} {reason} (e.g. {report.examples[reason]})"
        for reason, count in sorted(report.dropped.items())
    )
    duplicates = manifest["duplicates"]
    return (
        f"data: tokenised {manifest['source']} in {seconds:.1f} s: {report.kept:,} of "
        f"{report.read:,} documents, {(train['bytes'] + validation['bytes']) / 1e6:.1f} MB, "
        f"{train['tokens'] + validation['tokens']:,} tokens; held out by content hash: "
        f"{validation['documents']:,} documents, {validation['tokens']:,} tokens; "
        f"{duplicates['repeated']:,} repeated, {duplicates['across_splits']:,} of training also "
        f"held out but for whitespace; left out: {dropped or 'none'}"
    )


def _load_source(config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    folder = prepared_folder(config.path)
    if folder is not None:
        return _load_prepared(config, tokenizer, folder)
    source = open_source(config)
    encoder = DocumentEncoder(config, tokenizer)
    key = hash_of(
        format=FORMAT,
        source=source.fingerprint(),
        tokenizer=tokenizer.fingerprint,
        encoder=encoder.settings(),
        validation_fraction=config.validation_fraction,
    )
    entry = cache_directory(config.cache_dir) / "corpora" / key
    manifest = read_manifest(entry)
    if manifest is None:
        discard(entry)
        with publish(entry) as directory:
            _tokenize(config, source, tokenizer, encoder, directory)
        manifest = read_manifest(entry)
        if manifest is None:
            raise UserError(f"{entry} was changed while it was written: remove it and start again")
    return _open(source.description, entry, manifest, config, tokenizer)


def _tokenize(
    config: DataConfig,
    source: Source,
    tokenizer: Tokenizer,
    encoder: DocumentEncoder,
    directory: Path,
) -> None:
    began = time.perf_counter()
    threshold = split_threshold(source, config.validation_fraction)
    with byte_progress(f"Tokenising {source.description}", source.total_bytes) as advance:
        shard = write_shard(
            directory,
            source,
            source.units(_WHOLE_FILES),
            encoder,
            vocab_size=tokenizer.vocab_size,
            threshold=threshold,
            skip_bad=config.on_bad_record == "skip",
            num_threads=available_cpus(),
            advance=advance,
        )
    about = about_corpus(config, source, tokenizer, encoder, threshold)
    manifest = make_manifest(directory, [{"directory": ".", **shard}], **about)
    write_manifest(directory, manifest)
    note(describe_result(manifest, time.perf_counter() - began))


def _load_prepared(config: DataConfig, tokenizer: Tokenizer, folder: Path) -> Corpus:
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(
            f"the prepared folder {folder} {why_unusable(folder)}: remove it and prepare it again, "
            "or restore it"
        )
    if tokenizer.fingerprint != manifest["tokenizer_fingerprint"]:
        raise UserError(
            f"{folder} was prepared with another tokenizer ({manifest['tokenizer']}) than "
            f"{tokenizer.name}: leave data.tokenizer out, or prepare it again"
        )
    defaults = DataConfig()
    for key in _SETTLED:
        value, settled = getattr(config, key), manifest["config"][key]
        if value not in (settled, getattr(defaults, key)):
            raise UserError(
                f"{folder} was prepared with {key}={settled} but this run has data.{key}={value}: "
                "leave it out, or prepare it again"
            )
    if config.chat_template is not None:
        template = load_chat_template(config.chat_template, tokenizer).source
        if template != manifest["settings"]["template"]:
            raise UserError(
                f"{folder} was prepared with another chat template than data.chat_template="
                f"{config.chat_template}: leave it out, or prepare it again"
            )
    keeps_first = manifest["settings"]["keeps_first"]
    if config.document_start != "auto" and keeps_first != (config.document_start == "none"):
        raise UserError(
            f"{folder} was prepared with document_start={manifest['config']['document_start']} "
            f"but this run has data.document_start={config.document_start}: leave it out, or "
            "prepare it again"
        )
    return _open(str(config.path), folder, manifest, config, tokenizer)


def _open(
    description: str,
    directory: Path,
    manifest: dict[str, Any],
    config: DataConfig,
    tokenizer: Tokenizer,
) -> Corpus:
    def stream(split: str) -> TokenStream:
        return open_stream(
            directory,
            split,
            manifest["shards"],
            np.dtype(manifest["dtype"]),
            start_id=start_id(config, tokenizer),
            pad_id=tokenizer.pad_id,
            vocab_size=tokenizer.vocab_size,
        )

    train, validation = stream("train"), stream("validation")
    return Corpus(description, manifest["digest"], train, validation, manifest, directory)


def prepared_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that lies in a prepared folder."""
    if not (folder / TOKENIZER_FOLDER).is_dir():
        raise UserError(f"{folder} is a damaged prepared folder: its {TOKENIZER_FOLDER}/ is gone")
    return load_tokenizer_file(folder / TOKENIZER_FOLDER)
