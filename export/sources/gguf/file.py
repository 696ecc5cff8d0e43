"""The GGUF container: keys and tensors of a file, or of all the parts it was split into.

Every length that a header claims is held against the file before anything of that length is read. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from via_sd.errors import ExportError, UnsupportedModelError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
#: Value types of a key, as `struct` writes them.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DIMENSIONS, _ALIGNMENT = 4, 1 << 20
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_AGAIN = "fetch it again"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        kind: how its values are stored.
        shape: outermost dimension first, as arrays have it.
        data: its bytes, uint8 [rows, bytes of a row], mapped from the file.
    """

    name: str
    file: Path
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray

    def values(self) -> np.ndarray:
        """The tensor in float32, or in float16 where it is stored so; a copy."""
        from gguf import GGMLQuantizationType, dequantize

        if self.kind == GGMLQuantizationType.F16:
            half: np.ndarray = self.data.view(np.float16).reshape(self.shape).copy()
            return half
        values: np.ndarray = dequantize(self.data, self.kind).reshape(self.shape)
        return values.astype(np.float32)


@dataclass(frozen=True)
class GgufFile:
    """Keys and tensors of a GGUF file, of all its parts together."""

    path: Path
    keys: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        name = self.keys.get("general.architecture")
        if not isinstance(name, str) or not name:
            raise UnsupportedModelError(
                f"{self.path} names no architecture (general.architecture); wanted the GGUF file of a language model"
            )
        return name

    def key(self, name: str) -> Any:
        """The value of `ARCHITECTURE.name`, None if the file does not have it."""
        return self.keys.get(f"{self.architecture}.{name}")


def open_gguf(path: Path) -> GgufFile:
    """Read the headers of `path`; of a file that is one part of several, those of all of them.

    Raises:
        ExportError: no GGUF file, a damaged or truncated one, or parts that are missing or do not belong together.
        UnsupportedModelError: tensors in a quantisation that cannot be dequantised.
    """
    first = _read(path)
    count = first.keys.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        _check_kinds(first)
        return first
    name = _PART.fullmatch(path.name)
    if name is None or int(name["count"]) != count:
        raise ExportError(
            f"{path} is one of {count} parts of a split model; wanted all of them in one folder, under their own "
            f"names (NAME-00001-of-{count:05d}.gguf)"
        )
    paths = [path.with_name(f"{name['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    if missing := [part.name for part in paths if not part.is_file()]:
        raise ExportError(f"{path} is one of {count} parts of a split model, and {', '.join(missing[:3])} is missing")
    parts = [first if part == path else _read(part) for part in paths]
    whole = GgufFile(path, parts[0].keys, {})
    for number, part in enumerate(parts):
        if part.keys.get("split.count") != count or part.keys.get("split.no") != number:
            raise ExportError(f"{part.path} is not part {number + 1} of {count} of the split model; {_AGAIN}")
        if twice := whole.tensors.keys() & part.tensors.keys():
            raise ExportError(f"{part.path} has {sorted(twice)[0]} a second time; {_AGAIN}")
        whole.tensors.update(part.tensors)
    total = parts[0].keys.get("split.tensors.count")
    if total is not None and total != len(whole.tensors):
        raise ExportError(f"{path} is split, and its parts have {len(whole.tensors)} tensors of {total}; {_AGAIN}")
    _check_kinds(whole)
    return whole


def _read(path: Path) -> GgufFile:
    with path.open("rb") as stream:
        magic = stream.read(4)
        if magic != MAGIC:
            raise ExportError(f"{path} is no GGUF file (it starts with {magic!r}, wanted {MAGIC!r})")
        try:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            return _Header(path, mapped).read()
        except (struct.error, ValueError, OverflowError) as error:  # UnicodeDecodeError is a ValueError
            raise ExportError(f"{path} is damaged or cut short: {error}; {_AGAIN}") from None


class _Header:
    """A file's header, read from its start; raises `ValueError` or `struct.error` where it makes no sense."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, len(MAGIC)

    def read(self) -> GgufFile:
        (version,) = self.numbers("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, wanted {' or '.join(map(str, _VERSIONS))} (little endian)")
        num_tensors, num_keys = self.numbers("QQ")
        self.check_room(num_tensors, 24)
        self.check_room(num_keys, 13)
        keys: dict[str, Any] = {}
        for _ in range(num_keys):
            name = self.string()
            if name in keys:
                raise ValueError(f"key {name} twice")
            keys[name] = self.value(*self.numbers("I"))
        alignment = keys.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= _ALIGNMENT:
            raise ValueError(f"alignment {alignment!r}")
        places = [self.place() for _ in range(num_tensors)]
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in places:
            if name in tensors:
                raise ValueError(f"tensor {name} twice")
            tensors[name] = self.tensor(name, shape, kind, start + offset)
        return GgufFile(self.path, keys, tensors)

    def numbers(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{layout}", self.data, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return found

    def check_room(self, count: int, size: int) -> None:
        """`count` entries of at least `size` bytes must fit in what is left of the file."""
        if count * size > len(self.data) - self.at:
            raise ValueError(f"{count} entries at byte {self.at}, past the file's end")

    def string(self) -> str:
        (length,) = self.numbers("Q")
        self.check_room(length, 1)
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"a value of type {kind}")
        element, count = self.numbers("IQ")
        if element in _SCALARS:
            self.check_room(count, struct.calcsize(_SCALARS[element]))
            return list(self.numbers(f"{count}{_SCALARS[element]}"))
        if element != _STRING:
            raise ValueError(f"an array of type {element}")
        self.check_room(count, 8)
        return [self.string() for _ in range(count)]

    def place(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        (dimensions,) = self.numbers("I")
        if not 0 < dimensions <= _DIMENSIONS:
            raise ValueError(f"tensor {name} of {dimensions} dimensions")
        shape = self.numbers(f"{dimensions}Q")
        kind, offset = self.numbers("IQ")
        return name, tuple(reversed(shape)), kind, offset

    def tensor(self, name: str, shape: tuple[int, ...], number: int, start: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise UnsupportedModelError(
                f"{self.path} uses quantisation type {number}, which this gguf package does not know; try a newer one "
                "(pip install -U gguf), or the original checkpoint"
            ) from None
        values, size = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % values:
            raise ValueError(f"tensor {name} of shape {list(shape)} in blocks of {values}")
        row = shape[-1] // values * size
        length = math.prod(shape[:-1]) * row
        if start + length > len(self.data):
            raise ValueError(f"tensor {name} ends at byte {start + length} of {len(self.data)}")
        data = np.frombuffer(self.data, np.uint8, length, start).reshape(-1, row)
        return GgufTensor(name, self.path, kind, shape, data)


def _check_kinds(file: GgufFile) -> None:
    kinds = {tensor.kind for tensor in file.tensors.values()}
    unknown = sorted(kind.name for kind in kinds if not _can_dequantise(kind))
    if unknown:
        raise UnsupportedModelError(
            f"{file.path} is quantised as {', '.join(unknown)}, which cannot be dequantised; "
            "use a file in one of the Q*_0, Q*_1, Q*_K or IQ formats, or the original checkpoint"
        )


def _can_dequantise(kind: GGMLQuantizationType) -> bool:
    from gguf import GGML_QUANT_SIZES, dequantize

    _, size = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
