"""A folder in Hugging Face's layout: config.json, safetensors files, tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from .array_files import StoredArray
from .config_reader import parse_object
from .safetensors_files import read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLE = ("*.bin", "*.pth", "*.pt", "*.ckpt", "*.pkl")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_OTHER_FILES = ("config.json", "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*")


@dataclass(frozen=True)
class HubDirectory:
    """An opened folder; headers are read and checked, tensors are not."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, StoredArray]

    def tokenizer_files(self) -> list[Path]:
        """The tokenizer's files, as far as there are any."""
        return tokenizer_files(self.path)

    def other_files(self) -> list[Path]:
        """Small files that go with the weights: configuration and licence."""
        found = (file for pattern in _OTHER_FILES for file in sorted(self.path.glob(pattern)))
        return [file for file in found if file.is_file()]


def open_hub_directory(path: str | Path) -> HubDirectory:
    """Opens a folder and reads the headers of its safetensors files.

    Raises:
      UserError: no config.json, no safetensors (or only pickle files), a missing or broken shard,
        an index that points elsewhere or disagrees with the shards; one line each.
    """
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give one with config.json and safetensors")
    config = read_json(folder / "config.json")
    tensors: dict[str, StoredArray] = {}
    for name in _weight_files(folder):
        for key, entry in read_header(_inside(folder, name)).items():
            if key in tensors:
                raise UserError(f"{folder}: tensor {key!r} is in both {tensors[key].path.name} and "
                                f"{name}: the folder mixes two checkpoints")  # fmt: skip
            tensors[key] = entry
    _check_index(folder, tensors)
    return HubDirectory(folder, config, tensors)


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files in a folder, as far as there are any."""
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; UserError when it is missing or is none."""
    try:
        return parse_object(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): it is needed") from error
    except ValueError as error:
        raise UserError(f"{path} is not a JSON object ({error}): download it again") from error


def _weight_files(folder: Path) -> list[str]:
    if (folder / INDEX).exists():
        return sorted(set(_weight_map(folder).values()))
    if (folder / SINGLE).exists():
        return [SINGLE]
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    if others:
        raise UserError(f"{folder} has {others[0]} but no {INDEX}: download that file too")
    pickles = sorted(file.name for pattern in _PICKLE for file in folder.glob(pattern))
    if pickles:
        raise UserError(
            f"{folder} holds {pickles[0]}, a pickle file, which can run code when it is read: "
            "use the model's safetensors release"
        )
    raise UserError(f"{folder} holds no {SINGLE} and no {INDEX}: download the weights")


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{folder / INDEX} has no weight_map: download it again")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith("safetensors"):
            raise UserError(
                f"{folder / INDEX} names the file {name!r}: file names there must be plain "
                "*.safetensors names without folders; do not use this checkpoint"
            )
    return weight_map


def _inside(folder: Path, name: str) -> Path:
    """The file, which must exist and be in the folder, or in the cache that the folder is of."""
    file = folder / name
    try:
        target, home = file.resolve(strict=True), folder.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # also a link to itself, no name
        raise UserError(f"{file} is missing or cannot be opened: download it") from error
    # Hugging Face's cache: models--X/snapshots/REVISION/name links to models--X/blobs/HASH.
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if target.parent != home and (blobs is None or target.parent != blobs):
        raise UserError(f"{file} is a link to {target}, outside {folder}: replace it by the file")
    if not target.is_file():
        raise UserError(f"{file} is not a file: download it again")
    return file


def _check_index(folder: Path, tensors: dict[str, StoredArray]) -> None:
    if not (folder / INDEX).exists():
        return
    weight_map = _weight_map(folder)
    for name in sorted(weight_map.keys() | tensors.keys()):
        if name not in tensors:
            raise UserError(
                f"{folder / weight_map[name]} lacks tensor {name!r}, which {INDEX} says it has: "
                "download both again"
            )
        if weight_map.get(name) != tensors[name].path.name:
            raise UserError(
                f"tensor {name!r} is in {tensors[name].path.name}, but {INDEX} says "
                f"{weight_map.get(name, 'nothing of it')}: download both again"
            )
