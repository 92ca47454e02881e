"""Reading NVFP4 folders: named weights that are dequantised when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import UserError, check_choice
from .array_files import StoredArray
from .hub_directory import HubDirectory
from .nvfp4 import Packed, Rule, unpack
from .weights import FLOATS, PlainWeights


class PartNames(NamedTuple):
    """Last parts of the names of a quantised linear's tensors."""

    codes: str
    scales: str
    scale: str

    def of(self, weight: str) -> tuple[str, ...]:
        """Names of the codes, scales and tensor scale of a weight."""
        stem = weight.removesuffix(".weight")
        return tuple(f"{stem}.{part}" for part in self)


class QuantizedWeights:
    """The weights of an NVFP4 folder; quantised ones come in the dtype that config.json states.

    parts: for each quantised linear, the entries of its codes, scales and tensor scale.
    """

    def __init__(
        self,
        directory: HubDirectory,
        rule: Rule,
        parts: dict[str, tuple[StoredArray, StoredArray, StoredArray]],
        rest: dict[str, StoredArray],
    ):
        config = directory.config
        dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        check_choice("dtype", dtype, FLOATS)
        self._rule: Rule = rule
        self._parts, self._dtype = parts, FLOATS[dtype]
        self._plain = PlainWeights(rest)
        self.quantized = frozenset(parts)
        self.dtypes = {**self._plain.dtypes, **dict.fromkeys(parts, self._dtype)}
        self.shapes = dict(self._plain.shapes)
        for name, (codes, scales, scale) in parts.items():
            self.shapes[name] = _shape(name, codes, scales, scale)

    def read(self, name: str) -> np.ndarray:
        if name not in self._parts:
            return self._plain.read(name)
        codes, scales, scale = (entry.read() for entry in self._parts[name])
        return unpack(Packed(codes, scales), scale.reshape(()), self._rule, self._dtype)

    def stored(self, name: str) -> StoredArray | None:
        return None if name in self._parts else self._plain.stored(name)


def find_parts(
    directory: HubDirectory,
    names: PartNames,
    is_codes: Callable[[str, StoredArray], bool],
    ignored: tuple[str, ...],
) -> tuple[dict[str, tuple[StoredArray, StoredArray, StoredArray]], dict[str, StoredArray]]:
    """(parts by the name of the weight, the other tensors).

    ignored: last parts of the names of tensors about activations and the key/value cache, which a
      high-precision model has no use for.

    Raises:
      UserError: a part of a quantised linear is missing.
    """
    rest = dict(directory.tensors)
    parts = {}
    for name, entry in directory.tensors.items():
        stem, _, last = name.rpartition(".")
        if last in ignored:
            del rest[name]
        elif last == names.codes and is_codes(name, entry):
            found = [rest.pop(f"{stem}.{part}", None) for part in names]
            for part, value in zip(names, found, strict=True):
                if value is None:
                    raise UserError(f"{directory.path} lacks tensor {stem}.{part}: {name} needs it")
            codes, scales, scale = found
            assert codes is not None and scales is not None and scale is not None
            parts[f"{stem}.weight"] = (codes, scales, scale)
    return parts, rest


def _shape(
    name: str, codes: StoredArray, scales: StoredArray, scale: StoredArray
) -> tuple[int, ...]:
    kinds = (codes.dtype.name, scales.dtype.name, scale.dtype.name)
    if kinds != ("uint8", "float8_e4m3fn", "float32") or len(codes.shape) != 2:
        raise UserError(f"{codes.path}: {name} is stored as {kinds}, which is not NVFP4")
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    if scales.shape != (rows, columns // 16) or scale.nbytes != 4:
        raise UserError(
            f"{codes.path}: {name} has scales {list(scales.shape)} and {list(scale.shape)} for "
            f"{[rows, columns]}: they do not fit"
        )
    return (rows, columns)


def check_format(value: object, wanted: str, key: str, where: Path) -> None:
    """Raises UserError unless a quantisation config has the one format that can be read."""
    if value != wanted:
        raise UserError(f"{where}: {key}={value!r} cannot be read, only {wanted!r}")
