"""A tensor in a file: where it lies, and reading it without keeping the file in memory.

Both file formats are described by the same `TensorInfo`, so one reader serves them. Reads are plain positioned reads
into memory of our own: pages of a memory map would count as memory of this process.
"""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np

from jaxlm.errors import CheckpointError

FLOATS: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
CHUNK = 1 << 18  # Weights per step of dequantisation: the temporaries stay within the processor's caches.


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file's header describes it.

    shape is that of the weights; stored names the type in the file: a key of `FLOATS`, another plain type, or a GGUF
    block type, in which case quantised is set.
    """

    name: str
    shape: tuple[int, ...]
    stored: str
    path: Path
    offset: int
    nbytes: int
    quantised: gguf.GGMLQuantizationType | None = None

    @property
    def dtype(self) -> np.dtype | None:
        """What `read` gives: the stored bits of a float type, float32 for blocks, None for what cannot be weights."""
        if self.quantised is not None:
            return np.dtype(np.float32) if can_dequantise(self.quantised) else None
        return FLOATS.get(self.stored)

    @property
    def size(self) -> int:
        """The number of weights."""
        return int(np.prod(self.shape, dtype=object))


def read(info: TensorInfo, out: np.ndarray | None = None) -> np.ndarray:
    """The weights, in `info.dtype` and `info.shape`; into `out` (C-contiguous, of that dtype and size) where given.

    Raises CheckpointError when the type holds no weights or the file has become shorter than its header says.
    """
    if info.dtype is None:
        raise CheckpointError(f"tensor {info.name!r} has type {info.stored}, which cannot be read as weights")
    flat = np.empty(info.size, info.dtype) if out is None else out.reshape(-1)
    if info.quantised is None:
        _read_into(info, 0, flat.view(np.uint8))
    else:
        _dequantise(info, info.quantised, flat)
    return flat.reshape(info.shape)


def read_raw(info: TensorInfo) -> np.ndarray:
    """The stored bytes as they are, uint8 [nbytes]."""
    out = np.empty(info.nbytes, np.uint8)
    _read_into(info, 0, out)
    return out


@functools.cache
def can_dequantise(kind: gguf.GGMLQuantizationType) -> bool:
    """Whether the gguf package turns blocks of this type into floats."""
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _dequantise(info: TensorInfo, kind: gguf.GGMLQuantizationType, flat: np.ndarray) -> None:
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = max(1, CHUNK // weights)
    for first in range(0, info.size // weights, blocks):
        raw = np.empty(min(blocks * size, info.nbytes - first * size), np.uint8)
        _read_into(info, first * size, raw)
        values = gguf.quants.dequantize(raw[None, :], kind).reshape(-1)
        flat[first * weights : first * weights + values.size] = values


def _read_into(info: TensorInfo, start: int, out: np.ndarray) -> None:
    """Fill `out` (uint8) with the tensor's bytes from `start` on."""
    view, position = memoryview(out.data), info.offset + start
    with open(info.path, "rb", buffering=0) as file:
        while view:
            count = os.preadv(file.fileno(), [view[: 1 << 30]], position)
            if count == 0:
                raise CheckpointError(f"tensor {info.name!r} is cut off: {info.path} ends at byte {position}")
            view, position = view[count:], position + count


def check_extents(tensors: list[TensorInfo], data_start: int, file_size: int, where: Path) -> None:
    """Refuse tensors that lie outside the file's data or over each other."""
    end, before = data_start, None
    for info in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if info.offset < end:
            other = f"overlaps {before!r}" if before else "lies in the header"
            raise CheckpointError(f"{where}: tensor {info.name!r} at byte {info.offset} {other}")
        end, before = info.offset + info.nbytes, info.name
        if end > file_size:
            raise CheckpointError(f"{where}: is cut off: tensor {info.name!r} ends at {end}, the file at {file_size}")
