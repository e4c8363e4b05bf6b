"""Writing a safetensors file as its tensors come, one at a time."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxlm.conversion.tensors import FLOATS
from jaxlm.errors import CheckpointError

NAMES = {dtype: name for name, dtype in FLOATS.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(path: Path, entries: Sequence[Entry], arrays: Iterable[np.ndarray]) -> None:
    """Write the arrays in the order of their entries. Raises CheckpointError for an array unlike its entry."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        place = [end, end + entry.nbytes]
        header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": place}
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # Readers map the data in place: it starts at a multiple of 8.
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry, array in zip(entries, arrays, strict=True):
            if array.shape != entry.shape or array.dtype != entry.dtype:
                found = f"{array.dtype} {list(array.shape)}"
                raise CheckpointError(f"tensor {entry.name!r} is {found}; expected {entry.dtype} {list(entry.shape)}")
            file.write(np.ascontiguousarray(array).data.cast("B") if array.dtype.name != "bfloat16" else _bytes(array))


def _bytes(array: np.ndarray) -> memoryview:
    """The bytes of an array whose dtype Python's buffers do not know."""
    return np.ascontiguousarray(array).view(np.uint16).data.cast("B")
