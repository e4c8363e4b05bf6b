"""The header of a safetensors file: 8 bytes of length, JSON, then the tensors' bytes without gaps."""

from pathlib import Path
from typing import Any

from jaxlm.conversion.json_file import parse_json
from jaxlm.conversion.tensors import TensorInfo, check_extents
from jaxlm.errors import CheckpointError

HEADER_LIMIT = 100_000_000  # That of the format's own library.
ITEM_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a file by name. Raises CheckpointError for a damaged, cut or contradictory file."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(HEADER_LIMIT, size - 8):
                found = f"a header of {length} bytes in a file of {size}"
                raise CheckpointError(f"{path}: is not a safetensors file, or cut off: {found}")
            header = parse_json(file.read(length), f"{path}: header")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise CheckpointError(f"{path}: __metadata__ is {str(notes)[:80]}; allowed: an object of strings")
    tensors = [_info(name, entry, path, 8 + length) for name, entry in header.items()]
    check_extents(tensors, 8 + length, size, path)
    stored = sum(t.nbytes for t in tensors)
    if 8 + length + stored != size:
        raise CheckpointError(f"{path}: has {size} bytes, its header describes {8 + length + stored}")
    return {t.name: t for t in tensors}


def _info(name: str, entry: Any, path: Path, start: int) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: its header entry is {str(entry)[:80]!r}; allowed: dtype, shape, data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise CheckpointError(f"{where} has dtype {str(dtype)[:80]!r}; allowed: {', '.join(ITEM_SIZES)}")
    if not _counts(shape) or len(shape) > 8:
        raise CheckpointError(f"{where} has shape {str(shape)[:80]}; allowed: up to 8 integers of at least 0")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has data_offsets {str(offsets)[:80]}; allowed: [begin, end]")
    nbytes = ITEM_SIZES[dtype]
    for size in shape:
        nbytes *= size
    if nbytes != offsets[1] - offsets[0]:
        found = f"the file gives {offsets[1] - offsets[0]}"
        raise CheckpointError(f"{where}: shape {shape} of {dtype} needs {nbytes} bytes, {found}")
    return TensorInfo(name, tuple(shape), dtype, path, start + offsets[0], nbytes)


def _counts(value: Any) -> bool:
    """Whether it is a list of integers from 0 up to what a file can hold."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)
