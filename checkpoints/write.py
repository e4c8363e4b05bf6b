"""Writing a checkpoint while its tensors stream by: peak memory is one tensor, whatever the size of the model."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.checkpoints.arrays import Progress, create_array, create_tree, write_slice
from jaxlm.checkpoints.files import FileInfo, hash_file, safe_name, sync_file, sync_folders, write_file
from jaxlm.checkpoints.layout import PARAMS, Leaf, leaf_name, model_leaves
from jaxlm.checkpoints.manifest import (
    CONFIG,
    MANIFEST,
    SOURCE_CONFIG,
    VERSION,
    Checkpoint,
    leaf_entry,
    read_checkpoint,
    seal,
)
from jaxlm.checkpoints.workspace import Workspace, check_destination, open_workspace, publish
from jaxlm.config import ModelConfig, to_dict
from jaxlm.errors import CheckpointError
from jaxlm.params import Params, abstract_params

# (leaf name, layer or None for the whole leaf, the array or a function that makes it)
Tensor = tuple[str, int | None, np.ndarray | Callable[[], np.ndarray]]


@dataclass(frozen=True)
class WritePlan:
    """What writing a checkpoint takes: bytes of arrays on disk, and of the largest tensor held at a time."""

    disk_bytes: int
    largest_tensor_bytes: int


def plan_write(config: ModelConfig) -> WritePlan:
    """Known before anything is read. Peak memory is the largest tensor (as the reader makes it) plus a constant."""
    leaves = model_leaves(config).values()
    disk = sum(math.prod(leaf.grid) * leaf.chunk_file_bytes for leaf in leaves)
    return WritePlan(disk, max(leaf.slice_bytes for leaf in leaves))


def write_checkpoint(
    dest: str | Path,
    config: ModelConfig,
    tensors: Iterable[Tensor],
    *,
    tokenizer_files: Mapping[str, bytes] | None = None,
    source_config: Mapping[str, Any] | None = None,
    eos_ids: Sequence[int] = (),
    source: str = "",
    extra: Mapping[str, Any] | None = None,
    source_paths: Sequence[str | Path] = (),
    force: bool = False,
    progress: Progress | None = None,
) -> Checkpoint:
    """Write a checkpoint to the folder `dest`, beside it at first and renamed when complete.

    tensors: every parameter once, in any order, as (leaf name such as "segments.0.0.attn.q", layer index, array). A
    stacked leaf comes layer by layer, or whole with layer None; others with layer None. Arrays have the shape and dtype
    that the config asks for. In place of an array a function may be given, which is called only if the slice is needed.
    tokenizer_files: files to keep, by name. source_paths: the files or folders that were read; with them an interrupted
    run is resumed by the next one, as long as they, the config and this version are the same.

    Raises CheckpointError for a destination that is not empty (unless force) or holds a source, too little disk space,
    a tensor that is unknown, missing, there twice, or of another shape or dtype, and whatever goes wrong with files.
    What force replaces is deleted at the end if it is a checkpoint, and kept as `<dest>.jaxlm-old` if not.
    """
    path = check_destination(dest, source_paths, force)
    files = _extra_files(config, tokenizer_files or {}, source_config)
    notes: dict[str, Any] = {"source": source, "eos_ids": [int(i) for i in eos_ids], "extra": dict(extra or {})}
    notes["tokenizer_files"] = sorted(tokenizer_files or {})
    seal(notes)  # What cannot be written is found before any work.
    leaves = model_leaves(config)
    fingerprint = source_fingerprint(source_paths, config) if source_paths else None
    try:
        with open_workspace(path, fingerprint) as work:
            _check_space(work, plan_write(config).disk_bytes)
            if not work.resumed:
                create_tree(work.checkpoint / PARAMS, abstract_params(config))
                work.begin(fingerprint)
            _write_arrays(work, leaves, tensors, progress)
            for name, data in files.items():
                write_file(work.checkpoint / name, data)
            _seal(work, leaves, set(files), notes)
            publish(work.checkpoint, path, force)
    except OSError as error:
        raise CheckpointError(f"{path}: could not be written: {error}") from error
    return read_checkpoint(path)


def save_params(dest: str | Path, config: ModelConfig, params: Params, **options: Any) -> Checkpoint:
    """Write parameters in memory (on any devices of this process); options as for `write_checkpoint`."""
    return write_checkpoint(dest, config, _slices(params), **options)


def source_fingerprint(paths: Sequence[str | Path], config: ModelConfig) -> str:
    """Tells a changed source, config or program version: names, sizes and times of all files, not their contents."""
    digest = hashlib.sha256(repr((VERSION, _version(), to_dict(config))).encode())
    for path in sorted(Path(p).expanduser().absolute() for p in paths):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            status = file.stat()
            digest.update(repr((str(file), status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()


def _slices(params: Params) -> Iterator[Tensor]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = leaf_name(path)
        if not getattr(leaf, "is_fully_addressable", True):
            raise CheckpointError(f"{name}: lies partly on other hosts; gather it before saving")
        if name.startswith("segments."):
            for layer in range(leaf.shape[0]):
                yield name, layer, functools.partial(_to_host, leaf, layer)
        else:
            yield name, None, functools.partial(_to_host, leaf)


def _to_host(leaf: jax.Array, layer: int | None = None) -> np.ndarray:
    return np.asarray(leaf if layer is None else leaf[layer])


def _extra_files(config: ModelConfig, kept: Mapping[str, bytes], source: Mapping[str, Any] | None) -> dict[str, bytes]:
    files = {CONFIG: json.dumps(to_dict(config), indent=1).encode()}
    if source is not None:
        files[SOURCE_CONFIG] = json.dumps(dict(source), indent=1).encode()
    for name, data in kept.items():
        if name in (MANIFEST, CONFIG, SOURCE_CONFIG) or safe_name(name).split("/")[0] == PARAMS:
            raise CheckpointError(f"tokenizer file {name!r}: the name is taken by the checkpoint itself")
        files[name] = data
    return files


def _check_space(work: Workspace, needed: int) -> None:
    needed -= sum(info.size for files in work.done.values() for info in files.values())
    free = shutil.disk_usage(work.checkpoint.parent).free
    if free < needed:
        raise CheckpointError(f"{work.checkpoint.parent}: needs {needed} more bytes of disk; {free} are free")


def _write_arrays(
    work: Workspace, leaves: dict[str, Leaf], tensors: Iterable[Tensor], progress: Progress | None
) -> None:
    left = {(leaf.name, layer) for leaf in leaves.values() for layer in _layers(leaf)}
    stores: dict[str, Any] = {}
    done, total = 0, sum(leaf.nbytes for leaf in leaves.values())
    for name, layer, value in tensors:
        leaf = leaves.get(name)
        if leaf is None:
            raise CheckpointError(f"tensor {name!r} is not a parameter of the config")
        slots = {(name, i) for i in (_layers(leaf) if layer is None else [layer])}
        if not slots <= left:
            raise CheckpointError(f"tensor {name!r}: layer {layer} is out of range or there twice")
        left -= slots
        if not _on_disk(work, (name, layer)):
            if name not in stores:
                stores[name] = create_array(work.checkpoint / PARAMS, leaf)
            _write_tensor(work, stores[name], leaf, layer, value)
        del value  # Or it would live on while the next one is made.
        done += leaf.nbytes if layer is None else leaf.slice_bytes
        if progress:
            progress(done, total, name)
    if left:
        name, layer = min(left, key=lambda slot: (slot[0], slot[1] or 0))
        where = f" of layer {layer}" if layer is not None else ""
        raise CheckpointError(f"tensor {name!r}{where} is missing, with {len(left) - 1} more")


def _layers(leaf: Leaf) -> Iterable[int | None]:
    return range(leaf.shape[0]) if leaf.stacked else [None]


def _on_disk(work: Workspace, key: tuple[str, int | None]) -> bool:
    files = work.done.get(key)
    paths = {work.checkpoint / name: info.size for name, info in (files or {}).items()}
    return files is not None and all(p.is_file() and p.stat().st_size == size for p, size in paths.items())


def _write_tensor(
    work: Workspace, store: Any, leaf: Leaf, layer: int | None, value: np.ndarray | Callable[[], np.ndarray]
) -> None:
    array = np.asarray(value() if callable(value) else value)
    shape = leaf.shape if layer is None else leaf.slice_shape
    if array.shape != shape or array.dtype != np.dtype(leaf.dtype):
        raise CheckpointError(
            f"tensor {leaf.name!r} is {array.dtype} {list(array.shape)}; the config asks for {leaf.dtype} {list(shape)}"
        )
    write_slice(store, leaf, layer, array)
    names = map(leaf.chunk_file, leaf.chunks(layer))
    work.note((leaf.name, layer), {name: hash_file(work.checkpoint / name) for name in names})


def _seal(work: Workspace, leaves: dict[str, Leaf], kept: set[str], notes: dict[str, Any]) -> None:
    """Write the manifest and make everything durable; leftovers of an interrupted run are removed."""
    folder = work.checkpoint
    files: dict[str, FileInfo] = {name: info for chunks in work.done.values() for name, info in chunks.items()}
    own = {f"{PARAMS}/{name}/zarr.json" for name in leaves} | kept
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name in own or path.parent == folder / PARAMS:
            sync_file(path)
            files[name] = hash_file(path)
        elif name not in files:
            path.unlink()
    data = {"format": "jaxlm", "version": VERSION, "jaxlm_version": _version(), **notes}
    data["leaves"] = {name: leaf_entry(leaf) for name, leaf in leaves.items()}
    data["files"] = {name: dataclasses.asdict(info) for name, info in sorted(files.items())}
    write_file(folder / MANIFEST, seal(data))
    sync_folders(folder)


def _version() -> str:
    try:
        return importlib.metadata.version("jaxlm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
