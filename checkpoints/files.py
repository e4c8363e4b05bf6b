"""Files of a checkpoint: names that stay inside it, sizes, hashes, JSON, and making sure that they are on the disk."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from jaxlm.checkpoints.layout import PARAMS
from jaxlm.errors import CheckpointError


@dataclass(frozen=True)
class FileInfo:
    """Size in bytes and SHA-256 (hex) of a file."""

    size: int
    sha256: str


def hash_file(path: Path) -> FileInfo:
    """Read a file once, in pieces."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileInfo(file.tell(), digest)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def check_hash(name: str | Path, found: FileInfo, expected: FileInfo) -> None:
    if found != expected:
        raise CheckpointError(f"{name}: has changed since the checkpoint was written (its SHA-256 differs)")


def check_sizes(folder: Path, files: dict[str, FileInfo]) -> None:
    """Every listed file is there in its full size."""
    for name, info in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder / name}: is missing from the checkpoint: {error.strerror}") from error
        if size != info.size:
            raise CheckpointError(f"{folder / name}: has {size} bytes; expected {info.size}")


def check_no_others(folder: Path, files: dict[str, FileInfo]) -> None:
    """No file that is not listed lies among the arrays (elsewhere it does no harm: it is never read)."""
    for file in (folder / PARAMS).rglob("*"):
        if file.is_file() and file.relative_to(folder).as_posix() not in files:
            raise CheckpointError(f"{file}: does not belong to the checkpoint (its manifest does not list it)")


def parse_json(data: bytes, where: str | Path) -> dict[str, Any]:
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds a JSON {type(value).__name__}; allowed: an object")
    return value


def safe_name(name: str) -> str:
    """A file name that stays inside the folder."""
    path = PurePosixPath(name)
    plain = "\\" not in name and "\0" not in name and name.isprintable()  # Half a surrogate pair is not printable.
    if not name or path.is_absolute() or ".." in path.parts or str(path) != name or not plain:
        raise CheckpointError(f"file name {name!r} leaves the folder or is not plain")
    return name


def read_checked(folder: Path, name: str, info: FileInfo) -> bytes:
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder / name}: cannot be read: {error.strerror}") from error
    check_hash(folder / name, FileInfo(len(data), hashlib.sha256(data).hexdigest()), info)
    return data


def sync_folders(folder: Path) -> None:
    """Make the names in a folder and below it durable (the contents of its files are synced as they are written)."""
    for parent, _, _ in os.walk(folder):
        sync_folder(Path(parent))


def sync_folder(folder: Path) -> None:
    if os.name != "posix":  # Elsewhere a folder cannot be opened.
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes) -> FileInfo:
    """Write and sync a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileInfo(len(data), hashlib.sha256(data).hexdigest())


def sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
