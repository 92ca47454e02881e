"""manifest.json: what a folder of token files holds. A folder without one is unfinished."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from .cache import hash_of
from .documents import ReadReport
from .streams import SPLITS, is_whole

FORMAT = 4  # raise it when files of the same key would differ
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
    write_checked(directory / MANIFEST_FILE, manifest)


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest if the folder is whole: present, as it was written, and its files too."""
    manifest = read_checked(directory / MANIFEST_FILE)
    if manifest.get("format") != FORMAT or not is_whole(directory, manifest["shards"]):
        return None
    return manifest


def why_unusable(directory: Path) -> str:
    """What is wrong with a folder that `read_manifest` does not read, in a few words."""
    written = _object(directory / MANIFEST_FILE).get("format")
    if isinstance(written, int) and written != FORMAT:
        return f"was written by another version (format {written}, this one has {FORMAT})"
    return "is damaged or was changed"


def write_checked(file: Path, values: dict[str, Any]) -> None:
    """Writes JSON and a hash of it, whole or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({**values, "check": hash_of(**values)}, indent=2) + "\n")
    partial.replace(file)


def read_checked(file: Path) -> dict[str, Any]:
    """What `write_checked` wrote; empty when it is missing, damaged or changed by hand."""
    values = _object(file)
    check = values.pop("check", None)
    return values if check == hash_of(**values) else {}


def _object(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
