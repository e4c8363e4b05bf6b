"""The folder in which a checkpoint grows, and its way to the destination.

`<dest>.jaxlm-partial/` beside the destination holds `checkpoint/`, a journal of the arrays that are on disk, and a
lock. A finished checkpoint is renamed to the destination in one step; until then the destination is untouched. When a
run dies, the next one with the same fingerprint goes on after the last journal line, and any other starts afresh.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from jaxlm.checkpoints.files import FileInfo, sync_folder
from jaxlm.checkpoints.manifest import JOURNAL, OLD_SUFFIX, PARTIAL_SUFFIX, is_checkpoint
from jaxlm.errors import CheckpointError, JaxlmError

Slice = tuple[str, int | None]  # Leaf name and layer; None is the whole leaf.


@dataclass(frozen=True)
class Workspace:
    """checkpoint: the growing folder. done: the files of every finished slice. resumed: an earlier run made some."""

    checkpoint: Path
    journal: BinaryIO
    done: dict[Slice, dict[str, FileInfo]]
    resumed: bool

    def note(self, key: Slice, files: dict[str, FileInfo]) -> None:
        """Record a slice whose files are on disk."""
        entry = {name: dataclasses.astuple(info) for name, info in files.items()}
        self._append({"slice": key, "files": entry})
        self.done[key] = files

    def begin(self, fingerprint: str | None) -> None:
        """Start the journal, once the empty checkpoint is there."""
        self._append({"fingerprint": fingerprint})

    def _append(self, entry: object) -> None:
        self.journal.write(_line(entry))
        self.journal.flush()


def check_destination(dest: str | Path, sources: Iterable[str | Path], force: bool) -> Path:
    """The destination as an absolute path. Raises CheckpointError if writing there would destroy something unasked."""
    path = Path(os.path.realpath(Path(dest).expanduser()))
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path}: is a file; the destination must be a folder or not exist")
    for source in sources:
        for place in (Path(source).expanduser().absolute(), Path(os.path.realpath(Path(source).expanduser()))):
            if path in (place, *place.parents):
                raise CheckpointError(f"{path}: holds the source {source}; choose another destination")
    if not force and _is_filled(path):
        raise CheckpointError(f"{path}: exists and is not empty; choose another destination, or force to replace it")
    return path


@contextlib.contextmanager
def open_workspace(dest: Path, fingerprint: str | None) -> Iterator[Workspace]:
    """A workspace for `dest`, locked against other processes. fingerprint None never resumes and cannot be resumed.

    On success, on bad input, and when it cannot be resumed, the partial folder is removed; otherwise it stays.
    """
    folder = dest.with_name(dest.name + PARTIAL_SUFFIX)
    keep = False
    with _making(folder), _lock(folder):
        _restore_old(dest)
        done, kept = _read_journal(folder / JOURNAL, fingerprint)
        checkpoint = folder / "checkpoint"
        resumed = kept > 0 and checkpoint.is_dir()
        if not resumed:
            shutil.rmtree(checkpoint, ignore_errors=True)
        try:
            with (folder / JOURNAL).open("ab" if resumed else "wb") as journal:
                journal.truncate(kept if resumed else 0)
                yield Workspace(checkpoint, journal, done if resumed else {}, resumed)
        except BaseException as error:
            keep = fingerprint is not None and not isinstance(error, JaxlmError)
            raise
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)


def publish(checkpoint: Path, dest: Path, force: bool) -> None:
    """Rename a finished checkpoint to its destination.

    What was there is moved aside first and moved back if that fails. A replaced checkpoint is then deleted; any other
    folder is never deleted, but kept beside the destination.
    """
    old = _free_name(dest)
    filled = _is_filled(dest)
    if filled and not force:
        raise CheckpointError(f"{dest}: is not empty any more; choose another destination, or force to replace it")
    if filled:
        os.rename(dest, old)
    elif dest.exists():
        dest.rmdir()
    try:
        os.rename(checkpoint, dest)
    except BaseException:
        if filled:
            os.rename(old, dest)
        raise
    sync_folder(dest.parent)
    if filled and is_checkpoint(old):
        shutil.rmtree(old)


def _is_filled(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir())


def _free_name(dest: Path) -> Path:
    names = (dest.with_name(f"{dest.name}{OLD_SUFFIX}{i or ''}") for i in range(1000))
    return next(path for path in names if not path.exists())


def _restore_old(dest: Path) -> None:
    """Undo or finish the replacement that a killed run left half done."""
    old = dest.with_name(dest.name + OLD_SUFFIX)
    if old.exists() and not dest.exists():
        os.rename(old, dest)
    elif is_checkpoint(old):
        shutil.rmtree(old)


def _line(entry: object) -> bytes:
    """A line of the journal: a checksum and JSON."""
    text = json.dumps(entry).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read_journal(path: Path, fingerprint: str | None) -> tuple[dict[Slice, dict[str, FileInfo]], int]:
    """(the finished slices, bytes of the journal that tell of them); 0 bytes without a journal of this fingerprint.

    A line that was cut short by a kill, or damaged since, ends it.
    """
    done: dict[Slice, dict[str, FileInfo]] = {}
    kept = 0
    for line in path.read_bytes().splitlines(keepends=True) if fingerprint is not None and path.is_file() else []:
        text = line[9:-1]
        if line != b"%08x %s\n" % (zlib.crc32(text), text):
            break
        entry = json.loads(text)
        if kept:
            done[tuple(entry["slice"])] = {name: FileInfo(*info) for name, info in entry["files"].items()}
        elif entry != {"fingerprint": fingerprint}:
            break
        kept += len(line)
    return done, kept


@contextlib.contextmanager
def _making(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be made: {error.strerror}") from error
    yield


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system drops when the process dies."""
    try:
        import fcntl
    except ImportError:  # Not on Windows; there two writers are not told apart.
        yield
        return
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(f"{folder}: another process is writing this checkpoint") from error
        yield
