"""Arrays on disk: an Orbax checkpoint whose arrays are written and read slice by slice.

Orbax saves whole arrays, which a streaming conversion never has. So Orbax writes the tree (its own metadata files, over
placeholders), and the arrays that its metadata points to are Zarr 3 arrays written here, part by part. Plain Orbax
restores the result onto any sharding. Reading needs no Orbax: one leaf at a time straight into aligned memory that the
CPU backend adopts without a copy, with the checksum of every chunk verified on the way.

Nothing here knows about models: `save_tree` and `restore_tree` take any tree of arrays (an optimizer's state too).
"""

import contextlib
import functools
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.checkpoints.layout import Leaf, leaf_name, tree_leaves
from jaxlm.errors import CheckpointError

Progress = Callable[[int, int, str], None]  # (bytes done, bytes in all, leaf name)
WRITES_IN_FLIGHT = 4  # Chunks; bounds the memory of a write beyond its argument.
ALIGNMENT = 64  # Bytes; what XLA's CPU backend needs to adopt a buffer.


def create_tree(folder: Path, tree: Any) -> None:
    """Make an Orbax checkpoint of this structure at `folder`, with no arrays in it yet.

    tree: arrays or `ShapeDtypeStruct`s. Whatever is at `folder` is replaced.
    """
    import orbax.checkpoint as ocp

    shutil.rmtree(folder, ignore_errors=True)
    placeholders = jax.tree.map(lambda a: np.zeros((1,) * len(a.shape), a.dtype), tree)
    with _quiet_absl(), ocp.PyTreeCheckpointer(use_ocdbt=False, use_zarr3=True) as checkpointer:
        checkpointer.save(folder, placeholders)
    for name in tree_leaves(tree):
        shutil.rmtree(folder / name)  # A name that differs from Orbax's fails here.


def create_array(folder: Path, leaf: Leaf) -> Any:
    """Make the Zarr array of a leaf, or open the one that an earlier run made; returns it for `write_slice`."""
    import tensorstore as ts

    metadata = {
        "shape": leaf.shape,
        "data_type": leaf.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": leaf.chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }
    # A chunk of zeros gets its file too, so that a missing file is always damage.
    spec = _spec(folder, leaf.name) | {"metadata": metadata, "store_data_equal_to_fill_value": True}
    return ts.open(spec, open=True, create=True).result()


def write_slice(store: Any, leaf: Leaf, layer: int | None, array: np.ndarray) -> None:
    """Write one layer of a stacked leaf, or a whole leaf (layer None). On return it is on disk, synced.

    Raises OSError when it cannot be written, for example because the disk is full.
    """
    pending: list[Any] = []
    try:
        for index in leaf.chunks(layer):
            window = leaf.window(index)
            part = array[window] if layer is None else array[window[1:]][None]
            pending.append(store[window].write(part, can_reference_source_data_indefinitely=True))
            if len(pending) == WRITES_IN_FLIGHT:
                pending.pop(0).result()
        for write in pending:
            write.result()
    except ValueError as error:  # How TensorStore reports trouble with files.
        raise OSError(f"{leaf.name}: {error}") from error


def save_tree(folder: Path, tree: Any) -> None:
    """Write any tree of arrays that this process can address. On return all arrays are on disk, synced."""
    create_tree(folder, tree)
    leaves = tree_leaves(tree)
    for leaf, array in zip(leaves.values(), jax.tree.leaves(tree), strict=True):
        write_slice(create_array(folder, leaf), leaf, None, np.asarray(array))


def restore_tree(folder: Path, target: Any, *, cast: bool = False, progress: Progress | None = None) -> Any:
    """Read the arrays of a checkpoint in the structure, dtypes and shardings of `target`.

    target: a tree of `jax.ShapeDtypeStruct`. A leaf with a sharding is put there, whatever devices it was saved from;
    one without goes to the default device. Peak memory is the result plus at most the largest leaf. Raises
    CheckpointError for a missing leaf, another shape, a damaged chunk, and another dtype unless `cast`.
    """
    leaves, done = tree_leaves(target), 0
    total = sum(leaf.nbytes for leaf in leaves.values())

    def restore(path: tuple[Any, ...], want: jax.ShapeDtypeStruct) -> jax.Array:
        nonlocal done
        name = leaf_name(path)
        array = _restore_leaf(folder, name, want, cast)
        done += leaves[name].nbytes
        if progress:
            progress(done, total, name)
        return array

    return jax.tree_util.tree_map_with_path(restore, target)


def _restore_leaf(folder: Path, name: str, want: jax.ShapeDtypeStruct, cast: bool) -> jax.Array:
    store = _open(folder, name)
    stored, dtype = store.dtype.numpy_dtype, np.dtype(want.dtype)
    if store.shape != want.shape:
        raise CheckpointError(f"{folder / name}: has shape {list(store.shape)}; expected {list(want.shape)}")
    if stored != dtype and not cast:
        raise CheckpointError(f"{folder / name}: has dtype {stored}; expected {dtype}")
    sharding = want.sharding
    if sharding is None or sharding.is_fully_addressable:
        # One read of the whole leaf: reading shard by shard would read a chunk once per shard that touches it.
        array = jax.device_put(_read(store, ..., dtype, name), sharding)
    else:
        read = functools.partial(_read, store, dtype=dtype, name=name)
        array = jax.make_array_from_callback(want.shape, sharding, read, dtype)
    return jax.block_until_ready(array)  # Lets go of the host's copy before the next leaf is read.


def _read(store: Any, index: Any, dtype: np.dtype, name: str) -> np.ndarray:
    """The part of a stored array at `index`, cast to `dtype`, in new aligned memory."""
    import tensorstore as ts

    view = store[index].translate_to[0] if store.rank else store
    out = aligned_empty(view.shape, dtype)
    source = view if store.dtype.numpy_dtype == dtype else ts.cast(view, ts.dtype(dtype))
    try:
        ts.array(out).write(source).result()
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{name}: cannot be read: {error}") from error
    if dtype == np.float16 and store.dtype.numpy_dtype != dtype and not np.isfinite(out).all():
        raise CheckpointError(f"{name}: has values that float16 cannot hold; allowed: float32, bfloat16")
    return out


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory at an address that the CPU backend takes over without a copy."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _open(folder: Path, name: str) -> Any:
    import tensorstore as ts

    try:
        spec = _spec(folder, name) | {"fill_missing_data_reads": False}
        return ts.open(spec, read=True, context=_reading()).result()
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{folder / name}: cannot be opened: {error}") from error


@functools.cache
def _reading() -> Any:
    """Chunks are checked and copied from mapped files where TensorStore can: faster, and no extra memory."""
    import tensorstore as ts

    try:
        return ts.Context({"file_io_mode": {"mode": "memmap"}})
    except ValueError:
        return ts.Context()


def _spec(folder: Path, name: str) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder / name}/"}}


@contextlib.contextmanager
def _quiet_absl() -> Iterator[None]:
    """Orbax warns about a step that does not apply to single-file arrays; errors still show."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
