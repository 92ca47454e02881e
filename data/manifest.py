"""manifest.json: what a folder of token files holds. A folder without one is unfinished."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from .cache import hash_of
from .documents import ReadReport
from .streams import SPLITS, is_whole

FORMAT = 3  # raise it when files of the same key would differ
MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
_COUNTS = ("documents", "tokens", "trained_tokens", "bytes")


def make_manifest(directory: Path, shards: list[dict[str, Any]], **about: Any) -> dict[str, Any]:
    """Puts the shards' counts together and counts duplicates.

    Args:
      directory: the folder.
      shards: in order, each with its `directory` in the folder, and what `write_shard` returned.
      about: `source`, `settings`, `config`, `dtype`, `tokenizer`, ...: goes in as it is. `settings`
        is part of the digest.

    Returns:
      The manifest. `digest` hashes the documents of both splits in their order, and `settings`: it
      is the same wherever, whenever and in however many shards the files were written.
      `duplicates`: `repeated` documents equal an earlier one; `across_splits` are training
      documents whose text is also held out, if whitespace is left aside (documents that are equal
      to the byte are always in the same split).
    """
    report = ReadReport()
    for shard in shards:
        report.add(ReadReport.from_dict(shard["read"]))
    hashes = {split: load_hashes(directory, shards, split) for split in SPLITS}
    digest = hashlib.blake2b(hash_of(settings=about["settings"]).encode(), digest_size=12)
    for split in SPLITS:
        digest.update(b"%d " % len(hashes[split]))
        digest.update(hashes[split][:, 0].astype("<u8").tobytes())
    return {
        "format": FORMAT,
        **about,
        "digest": digest.hexdigest(),
        "read": report.as_dict(),
        "duplicates": count_duplicates(hashes),
        **{
            split: {key: sum(shard[split][key] for shard in shards) for key in _COUNTS}
            for split in SPLITS
        },
        "shards": shards,
    }


def load_hashes(directory: Path, shards: list[dict[str, Any]], split: str) -> np.ndarray:
    """uint64 [documents, 2]: of each document and of its text without whitespace."""
    files = [directory / shard["directory"] / f"{split}.hashes.npy" for shard in shards]
    return np.concatenate([np.zeros((0, 2), np.uint64), *(np.load(file) for file in files)])


def count_duplicates(hashes: dict[str, np.ndarray]) -> dict[str, int]:
    """`repeated` and `across_splits`, see `make_manifest`."""
    every = np.concatenate([hashes[split][:, 0] for split in SPLITS])
    shared = np.isin(hashes["train"][:, 1], hashes["validation"][:, 1])
    return {
        "repeated": len(every) - len(np.unique(every)),
        "across_splits": int(shared.sum()),
    }


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Writes it whole or not at all."""
    partial = directory / f"{MANIFEST_FILE}.partial"
    partial.write_text(json.dumps(manifest, indent=2) + "\n")
    partial.replace(directory / MANIFEST_FILE)


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest if the folder is whole: present, readable, and its files as they were."""
    try:
        manifest = json.loads((directory / MANIFEST_FILE).read_text())
        np.dtype(manifest["dtype"])
        ReadReport.from_dict(manifest["read"])
        whole = manifest["digest"] and manifest["format"] == FORMAT
        return manifest if whole and is_whole(directory, manifest["shards"]) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
