"""Our parameters on disk, a slab at a time: written in a layout that Orbax reads, read from any.

A converted checkpoint is a Zarr 3 array per parameter, uncompressed, with its axes in the stored
order of `layout.py`; Orbax restores it like one of its own. `ParameterReader` reads that and what
training saves (OCDBT).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from .array_files import Check, StoredArray, write_array
from .layout import Index, Parameter

_CHUNK_BYTES = 128 * 2**20
_ORBAX_METADATA = "_METADATA"
_DESCRIPTION = "zarr.json"


class ParameterWriter:
    """Writes parameters of known shapes into an Orbax item; `finish` makes it readable."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True)
        self._tree: dict[str, Any] = {}
        self._arrays: list[dict[str, Any]] = []

    def add(self, parameter: Parameter, dtype: np.dtype) -> None:
        """Declares a parameter; its slabs can then be written in any order."""
        (self.folder / parameter.name).mkdir()
        description = _describe(parameter, dtype)
        (self.folder / parameter.name / _DESCRIPTION).write_text(json.dumps(description))
        self._tree[str(parameter.path)] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in parameter.path],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": list(parameter.shape),
            },
        }
        self._arrays.append({
            "array_metadata": {
                "param_name": parameter.name,
                "write_shape": list(parameter.shape),
                "chunk_shape": description["chunk_grid"]["configuration"]["chunk_shape"],
                "ext_metadata": None,
            }
        })  # fmt: skip

    def write(
        self,
        parameter: Parameter,
        leading: tuple[int, ...],
        chunk: int,
        data: np.ndarray | StoredArray,
        *,
        check: Check = None,
    ) -> None:
        """Writes chunk number `chunk` along the first stored axis of one slab. Thread-safe."""
        name = _chunk_name(parameter, leading, chunk)
        with (self.folder / parameter.name / name).open("wb", buffering=0) as file:
            write_array(file.fileno(), data, check=check)

    def finish(self) -> None:
        """Writes what tells Orbax that these are arrays of one tree."""
        arrays = self.folder / "array_metadatas"
        arrays.mkdir()
        (arrays / "process_0").write_text(json.dumps({"array_metadatas": self._arrays}))
        metadata = {
            "tree_metadata": self._tree,
            "use_ocdbt": False,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        (self.folder / _ORBAX_METADATA).write_text(json.dumps(metadata))


def _describe(parameter: Parameter, dtype: np.dtype) -> dict[str, Any]:
    """The zarr.json of a parameter."""
    chunk = list(parameter.shape)
    chunk[: parameter.leading] = [1] * parameter.leading
    first = parameter.leading + parameter.order[0]
    chunk[first] = chunk_rows(parameter, dtype)
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if parameter.stored_axes != tuple(range(len(parameter.shape))):
        order = {"order": list(parameter.stored_axes)}
        codecs.insert(0, {"name": "transpose", "configuration": order})
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(parameter.shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0,
        "codecs": codecs,
    }


def _chunk_name(parameter: Parameter, leading: tuple[int, ...], chunk: int) -> str:
    index = [0] * len(parameter.shape)
    index[: parameter.leading] = leading
    index[parameter.leading + parameter.order[0]] = chunk
    return ".".join(["c", *map(str, index)])


def chunk_rows(parameter: Parameter, dtype: np.dtype) -> int:
    """Length of a chunk along the first stored axis, a divisor of it.

    gate and up are a chunk each, so that each is one tensor of Hugging Face's; q, k and v
    interleave in theirs, which stays whole; the rest is cut where it exceeds 128 MiB.
    """
    if parameter.kind == "gate_up":
        return 1
    rows = parameter.slab_shape[0]
    if parameter.kind == "qkv":
        return rows
    row_bytes = math.prod(parameter.slab_shape[1:]) * dtype.itemsize
    parts = max(1, math.ceil(rows * row_bytes / _CHUNK_BYTES))
    while rows % parts:
        parts += 1
    return rows // parts


class ParameterReader:
    """Reads slabs of a checkpoint's parameters item, whoever wrote it.

    Attributes:
      shapes, dtypes: by dotted name.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            metadata = json.loads((folder / _ORBAX_METADATA).read_text(encoding="utf-8"))
            trees = metadata["tree_metadata"].values()
            paths = [tuple(str(key["key"]) for key in leaf["key_metadata"]) for leaf in trees]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder} is not a checkpoint's parameters ({error})") from error
        driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        self._stores = {".".join(path): self._open(driver, ".".join(path)) for path in paths}
        self.shapes = {name: tuple(store.shape) for name, store in self._stores.items()}
        self.dtypes = {name: store.dtype.numpy_dtype for name, store in self._stores.items()}

    def _open(self, driver: str, name: str) -> Any:
        import tensorstore

        kvstore: dict[str, Any] = {"driver": "file", "path": f"{self.folder}/{name}/"}
        if (self.folder / "manifest.ocdbt").exists():
            kvstore = {"driver": "ocdbt", "base": f"file://{self.folder}/", "path": f"{name}/"}
        try:
            return tensorstore.open(
                {"driver": driver, "kvstore": kvstore, "recheck_cached_data": "open"}, read=True
            ).result()
        except ValueError as error:
            raise self._damaged(name, error) from error

    def read(self, parameter: Parameter, leading: tuple[int, ...], index: Index = ()) -> np.ndarray:
        """`index` of one slab in stored order."""
        whole = self._stored(parameter, leading, index[0] if index else slice(None))
        if whole is not None:
            every = (slice(None),) if index and isinstance(index[0], slice) else ()
            return whole.read()[(*every, *index[1:])]
        store = self._stores[parameter.name].transpose(parameter.stored_axes)
        try:
            return store[(*leading, *index)].read().result()
        except (ValueError, IndexError) as error:
            raise self._damaged(parameter.name, error) from error

    def find(
        self, parameter: Parameter, leading: tuple[int, ...], rows: int | slice
    ) -> np.ndarray | StoredArray:
        """`rows` of one slab in stored order: where they lie, or, if they are spread, read."""
        stored = self._stored(parameter, leading, rows)
        return self.read(parameter, leading, (rows,)) if stored is None else stored

    def _stored(
        self, parameter: Parameter, leading: tuple[int, ...], rows: int | slice
    ) -> StoredArray | None:
        """The rows in the one chunk that they lie in, if `ParameterWriter` wrote it so."""
        dtype = self.dtypes[parameter.name]
        folder = self.folder / parameter.name
        length, size = chunk_rows(parameter, dtype), parameter.slab_shape[0]
        start, stop = (rows, rows + 1) if isinstance(rows, int) else rows.indices(size)[:2]
        chunk = start // length
        if stop > (chunk + 1) * length or not (folder / _DESCRIPTION).is_file():
            return None
        shape = (length, *parameter.slab_shape[1:])
        found = StoredArray(folder / _chunk_name(parameter, leading, chunk), 0, dtype, shape)
        try:
            description = json.loads((folder / _DESCRIPTION).read_text())
            if (
                description != _describe(parameter, dtype)
                or found.path.stat().st_size != found.nbytes
            ):
                return None
        except (OSError, ValueError):  # TensorStore says what is wrong
            return None
        found = found[start - chunk * length : stop - chunk * length]
        return found.reshape(shape[1:]) if isinstance(rows, int) else found

    def _damaged(self, name: str, error: Exception) -> UserError:
        reason = " ".join(str(error).split())
        return UserError(f"{self.folder}: parameter {name} cannot be read ({reason})")
