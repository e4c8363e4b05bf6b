"""The manifest `jaxlm.json`: what a checkpoint holds, with the size and SHA-256 of every file.

It is written last, so a folder without it is not a checkpoint. Reading checks it against the config, all sizes, and the
hashes of all files but array chunks. Those carry their own checksums, which every load verifies, so that opening is
cheap and a flipped byte is still found. `verify_checkpoint` hashes everything.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from jaxlm.checkpoints.files import (
    FileInfo,
    check_hash,
    check_no_others,
    check_sizes,
    hash_file,
    parse_json,
    read_checked,
    safe_name,
)
from jaxlm.checkpoints.layout import PARAMS, Leaf, model_leaves
from jaxlm.config import ModelConfig, from_dict
from jaxlm.errors import CheckpointError, ConfigError

MANIFEST = "jaxlm.json"
CONFIG = "model_config.json"
SOURCE_CONFIG = "source_config.json"
VERSION = 1
JOURNAL = "journal.jsonl"  # Beside an unfinished checkpoint, see workspace.py.
PARTIAL_SUFFIX = ".jaxlm-partial"
OLD_SUFFIX = ".jaxlm-old"
MAX_JSON_BYTES = 256 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk that has been opened: everything but the arrays.

    path: the folder. source: where it came from, in words. eos_ids: all ids that end a text. tokenizer_files: the names
    of the files kept as they were (tokenizer, chat template, generation defaults). extra: whatever else the writer
    noted. files: every file by its path relative to the folder, with "/". `restore_params` reads the arrays.
    """

    path: Path
    config: ModelConfig
    leaves: dict[str, Leaf]
    files: dict[str, FileInfo]
    source: str = ""
    eos_ids: tuple[int, ...] = ()
    tokenizer_files: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def read_file(self, name: str) -> bytes:
        """The content of a file of the checkpoint, checked against its hash."""
        if name not in self.files:
            raise CheckpointError(f"{self.path}: holds no file {name!r}")
        return read_checked(self.path, name, self.files[name])

    @property
    def source_config(self) -> dict[str, Any] | None:
        """The published config that this checkpoint was converted from, if there was one."""
        return parse_json(self.read_file(SOURCE_CONFIG), SOURCE_CONFIG) if SOURCE_CONFIG in self.files else None

    @property
    def nbytes(self) -> int:
        """The size of all parameters in memory."""
        return sum(leaf.nbytes for leaf in self.leaves.values())


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint: manifest and config, no arrays.

    Raises CheckpointError, naming the file, when the folder is not a finished checkpoint, of an unknown version, or a
    file is missing, has another size or (all but array chunks) another content than when it was written.
    """
    folder = Path(path).expanduser().absolute()
    data = _read_manifest(folder)
    files = {safe_name(name): _file_info(name, info) for name, info in _field(data, "files", dict).items()}
    check_sizes(folder, files)
    check_no_others(folder, files)
    for name, info in files.items():
        if not _is_chunk(name):
            read_checked(folder, name, info)
    config = _read_config(folder, files)
    leaves = _stored_leaves(_field(data, "leaves", dict), model_leaves(config))
    _check_chunks(leaves, files)
    eos_ids, tokenizer_files = _items(data, "eos_ids", int), _items(data, "tokenizer_files", str)
    for name in tokenizer_files:
        if name not in files:
            raise CheckpointError(f"{folder / MANIFEST}: tokenizer file {name!r} is not among its files")
    return Checkpoint(
        folder, config, leaves, files, _field(data, "source", str), eos_ids,
        tokenizer_files, _field(data, "extra", dict),
    )  # fmt: skip


def verify_checkpoint(path: str | Path, progress: Callable[[int, int, str], None] | None = None) -> Checkpoint:
    """Open a checkpoint and hash every byte. Raises CheckpointError naming the first file that differs."""
    checkpoint = read_checkpoint(path)
    done, total = 0, sum(info.size for info in checkpoint.files.values())
    for name, info in checkpoint.files.items():
        check_hash(name, hash_file(checkpoint.path / name), info)
        done += info.size
        if progress:
            progress(done, total, name)
    return checkpoint


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder claims to be a jaxlm checkpoint."""
    return (Path(path) / MANIFEST).is_file()


def seal(data: dict[str, Any]) -> bytes:
    """The manifest as bytes, with a hash over its own content."""
    try:
        content = json.loads(json.dumps(data))  # Keys become strings.
        return json.dumps(content | {"sha256": _own_hash(content)}, indent=1).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST}: {error}; allowed in extra: what JSON can hold") from error


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(_why_no_checkpoint(folder))
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: has {path.stat().st_size} bytes; allowed: at most {MAX_JSON_BYTES}")
    data = parse_json(path.read_bytes(), path)
    if data.get("format") != "jaxlm":
        raise CheckpointError(f"{path}: format is {data.get('format')!r}; allowed: 'jaxlm'")
    if data.get("version") != VERSION:
        raise CheckpointError(f"{path}: version is {data.get('version')!r}; this jaxlm reads version {VERSION}")
    if data.pop("sha256", None) != _own_hash(data):
        raise CheckpointError(f"{path}: has changed since the checkpoint was written (its SHA-256 differs)")
    return data


def _why_no_checkpoint(folder: Path) -> str:
    if not folder.exists():
        for suffix, what in ((PARTIAL_SUFFIX, "an interrupted conversion"), (OLD_SUFFIX, "the replaced checkpoint")):
            other = folder.with_name(folder.name + suffix)
            if other.exists():
                return f"{folder}: does not exist; {what} lies at {other}: convert again"
        return f"{folder}: does not exist"
    unfinished = (folder / JOURNAL).exists() or (folder.parent / JOURNAL).exists()
    return f"{folder}: is {'an interrupted conversion' if unfinished else 'not a jaxlm checkpoint'} (no {MANIFEST})"


def _own_hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _field(data: dict[str, Any], name: str, kind: type) -> Any:
    if not isinstance(data.get(name), kind):
        raise CheckpointError(f"{MANIFEST}: {name} is {data.get(name)!r:.80}; allowed: a {kind.__name__}")
    return data[name]


def _items(data: dict[str, Any], name: str, kind: type) -> tuple[Any, ...]:
    items = _field(data, name, list)
    if not all(isinstance(item, kind) for item in items):
        raise CheckpointError(f"{MANIFEST}: {name} is {items!s:.80}; allowed: a list of {kind.__name__}")
    return tuple(items)


def _file_info(name: str, info: Any) -> FileInfo:
    fields = info if isinstance(info, dict) else {}
    size, digest = fields.get("size"), fields.get("sha256")
    if not isinstance(size, int) or not isinstance(digest, str):
        raise CheckpointError(f"{MANIFEST}: files[{name!r}] has no size or no sha256")
    return FileInfo(size, digest)


def _is_chunk(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return len(parts) == 3 and parts[0] == PARAMS and parts[2].split(".")[0] == "c"


def _read_config(folder: Path, files: dict[str, FileInfo]) -> ModelConfig:
    if CONFIG not in files:
        raise CheckpointError(f"{folder / MANIFEST}: {CONFIG} is not among its files")
    data = parse_json(read_checked(folder, CONFIG, files[CONFIG]), folder / CONFIG)
    try:
        config = from_dict(data)
    except (ConfigError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from error
    if not isinstance(config, ModelConfig):
        raise CheckpointError(f"{folder / CONFIG}: holds a {type(config).__name__}; allowed: ModelConfig")
    return config


def _stored_leaves(listed: dict[str, Any], leaves: dict[str, Leaf]) -> dict[str, Leaf]:
    """The manifest's arrays, which must be exactly those of the config. How they are cut is the writer's choice."""
    for name in sorted(listed.keys() ^ leaves.keys()):
        where = "is not a parameter of the config" if name in listed else "is missing"
        raise CheckpointError(f"{MANIFEST}: array {name!r} {where}")
    result = {}
    for name, leaf in leaves.items():
        chunk = listed[name].get("chunk") if isinstance(listed[name], dict) else None
        if not isinstance(chunk, list) or len(chunk) != len(leaf.shape) or not _positive(chunk):
            raise CheckpointError(f"{MANIFEST}: array {name!r} is {listed[name]!s:.200}, with no valid chunk shape")
        result[name] = replace(leaf, chunk=tuple(chunk))
        expected = leaf_entry(result[name])
        if listed[name] != expected:
            raise CheckpointError(
                f"{MANIFEST}: array {name!r} is {listed[name]!r:.200}; the config asks for {expected!r}"
            )
    return result


def _positive(sizes: list[Any]) -> bool:
    return all(isinstance(size, int) and size > 0 for size in sizes)


def _check_chunks(leaves: dict[str, Leaf], files: dict[str, FileInfo]) -> None:
    """Every chunk is listed, in the size that its shape gives: what is read later is as large as it says."""
    count = sum(1 for name in files if _is_chunk(name))
    expected = sum(math.prod(leaf.grid) for leaf in leaves.values())
    if count != expected:
        raise CheckpointError(f"{MANIFEST}: lists {count} array chunks; the config asks for {expected}")
    for leaf in leaves.values():
        for name in map(leaf.chunk_file, leaf.chunks()):
            if name not in files or files[name].size != leaf.chunk_file_bytes:
                raise CheckpointError(f"{name}: is not listed with {leaf.chunk_file_bytes} bytes in {MANIFEST}")


def leaf_entry(leaf: Leaf) -> dict[str, Any]:
    """What the manifest says about an array."""
    return {"shape": list(leaf.shape), "dtype": leaf.dtype, "chunk": list(leaf.chunk)}
