"""The head of a GGUF file: metadata and the tensor table. Every count is checked against the file before it is used."""

import struct
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np

from jaxlm.conversion.tensors import TensorInfo, check_extents
from jaxlm.errors import CheckpointError

Metadata = dict[str, Any]

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DEPTH = 3  # of arrays in arrays
STEP = 1 << 20


class _Cursor:
    """Little-endian values one after another; reads the file step by step, and never past its end."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self.file, self.size, self.path = file, size, path
        self.data, self.pos = b"", 0  # What has been read so far, and the place of the next value.

    def left(self) -> int:
        return self.size - self.pos

    def need(self, count: int, what: str) -> int:
        """Make `count` more bytes available; the position of the first of them."""
        if count > self.left():
            left = f"{what} needs {count} bytes, {self.left()} are left"
            raise CheckpointError(f"{self.path}: is cut off or damaged: {left}")
        missing = self.pos + count - len(self.data)
        if missing > 0:
            self.data += self.file.read(max(missing, STEP, len(self.data)))
        self.pos += count
        if self.pos > len(self.data):
            raise CheckpointError(f"{self.path}: became shorter while it was read")
        return self.pos - count

    def scalar(self, code: str, what: str) -> Any:
        start = self.need(struct.calcsize("<" + code), what)
        return struct.unpack_from("<" + code, self.data, start)[0]

    def string(self, what: str) -> str:
        length = self.scalar("Q", what)
        start = self.need(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not valid UTF-8") from error

    def count(self, least: int, what: str) -> int:
        """A number of things that take at least `least` bytes each."""
        value = self.scalar("Q", what)
        if value * least > self.left():
            left = f"{what} is {value}, {self.left()} bytes are left"
            raise CheckpointError(f"{self.path}: is cut off or damaged: {left}")
        return value

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind], what)
        if kind == STRING:
            return self.string(what)
        if kind != ARRAY or depth == MAX_DEPTH:
            allowed = f"0 to 12, arrays up to {MAX_DEPTH} deep"
            raise CheckpointError(f"{self.path}: {what} has value type {kind}; allowed: {allowed}")
        return self.array(self.scalar("I", what), what, depth)

    def array(self, kind: int, what: str, depth: int) -> list[Any]:
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
            length = self.count(dtype.itemsize, f"the length of {what}")
            start = self.need(length * dtype.itemsize, what)
            return np.frombuffer(self.data, dtype, length, start).tolist()
        length = self.count(8, f"the length of {what}")
        return [self.value(kind, what, depth + 1) for _ in range(length)]


def read_gguf(path: Path) -> tuple[Metadata, dict[str, TensorInfo]]:
    """The metadata (numbers, strings, lists) and every tensor by name, dimensions outermost first.

    Raises CheckpointError for a damaged, cut or contradictory file, and for a tensor type that is not known.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            return _read(_Cursor(file, size, path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _read(cursor: _Cursor) -> tuple[Metadata, dict[str, TensorInfo]]:
    magic = cursor.scalar("4s", "the magic number")
    version = cursor.scalar("I", "the version")
    if magic != b"GGUF" or version not in (2, 3):
        found = f"starts with {magic!r}, version {version}"
        raise CheckpointError(f"{cursor.path}: {found}; allowed: GGUF, little-endian, version 2 or 3")
    tensor_count = cursor.count(24, "the number of tensors")
    metadata = _read_metadata(cursor, cursor.count(13, "the number of metadata entries"))
    table = [_read_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        allowed = f"a power of two up to {1 << 20}"
        raise CheckpointError(f"{cursor.path}: general.alignment is {alignment!r}; allowed: {allowed}")
    start = -(-cursor.pos // alignment) * alignment
    tensors = [_info(cursor.path, *entry, start, alignment) for entry in table]
    check_extents(tensors, start, cursor.size, cursor.path)
    by_name = {t.name: t for t in tensors}
    if len(by_name) < len(tensors):
        names = [t.name for t in tensors]
        raise CheckpointError(f"{cursor.path}: tensor {next(n for n in names if names.count(n) > 1)!r} is there twice")
    return metadata, by_name


def _read_metadata(cursor: _Cursor, count: int) -> Metadata:
    metadata: Metadata = {}
    for _ in range(count):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise CheckpointError(f"{cursor.path}: metadata key {key!r} is there twice")
        metadata[key] = cursor.value(cursor.scalar("I", key), repr(key))
    return metadata


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape outermost first, type number, offset from the start of the data)."""
    name = cursor.string("a tensor name")
    rank = cursor.scalar("I", f"tensor {name!r}")
    if not 1 <= rank <= 4:
        raise CheckpointError(f"{cursor.path}: tensor {name!r} has {rank} dimensions; allowed: 1 to 4")
    dims = [cursor.scalar("Q", f"tensor {name!r}") for _ in range(rank)]
    return name, tuple(reversed(dims)), cursor.scalar("I", f"tensor {name!r}"), cursor.scalar("Q", f"tensor {name!r}")


def _info(
    path: Path, name: str, shape: tuple[int, ...], number: int, offset: int, start: int, alignment: int
) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError as error:
        raise CheckpointError(f"{where} has type {number}, which is not a known GGUF tensor type") from error
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % weights or 0 in shape:
        allowed = f"rows of a multiple of {weights} weights"
        raise CheckpointError(f"{where} has shape {list(shape)}; allowed for {kind.name}: {allowed}")
    if offset % alignment:
        raise CheckpointError(f"{where} is at byte {offset} of the data; allowed: a multiple of {alignment}")
    count = 1
    for dim in shape:
        count *= dim
    plain = kind.name in ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")
    return TensorInfo(name, shape, kind.name, path, start + offset, count // weights * size, None if plain else kind)
