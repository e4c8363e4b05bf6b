"""Where each parameter lies in a checkpoint: leaf names, chunk shapes and the files that must be there.

A leaf is one array of the tree. Every array is a Zarr 3 array in its own folder `params/<name>/`: `zarr.json` and one
file per chunk, uncompressed, each with a CRC-32C at its end that every reader checks.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxlm.config import ModelConfig
from jaxlm.params import abstract_params, declare

PARAMS = "params"
CHUNK_BYTES = 16 << 20  # Larger chunks cost memory while reading and writing, smaller ones cost files.
CRC_BYTES = 4
# Axes that tensor parallelism cuts: chunks are cut along them first, so that a device reads only its own chunks.
CUT_FIRST = ("vocab", "experts", "mlp", "heads", "kv_heads")


@dataclass(frozen=True)
class Leaf:
    """One array: dotted name, full shape, dtype name, shape of a chunk. Stacked: a layer per index [R, ...]."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    stacked: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """The shape of one layer of a stacked leaf, of the whole of another."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def slice_bytes(self) -> int:
        return math.prod(self.slice_shape) * np.dtype(self.dtype).itemsize

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along each axis."""
        return tuple(-(-size // part) for size, part in zip(self.shape, self.chunk, strict=True))

    @property
    def chunk_file_bytes(self) -> int:
        """The size of every chunk's file; chunks at an edge are padded."""
        return math.prod(self.chunk) * np.dtype(self.dtype).itemsize + CRC_BYTES

    def chunk_file(self, index: tuple[int, ...]) -> str:
        """The file of the chunk at a grid index, relative to the checkpoint."""
        return f"{PARAMS}/{self.name}/{'.'.join(('c', *map(str, index)))}"

    def chunks(self, layer: int | None = None) -> list[tuple[int, ...]]:
        """The grid indices of all chunks, or of one layer's."""
        axes = [range(n) for n in self.grid]
        if layer is not None:
            axes[0] = range(layer, layer + 1)  # A chunk never spans two layers.
        return list(itertools.product(*axes))

    def window(self, index: tuple[int, ...]) -> tuple[slice, ...]:
        """The part of the array that a chunk holds."""
        parts = zip(index, self.chunk, self.shape, strict=True)
        return tuple(slice(i * part, min((i + 1) * part, size)) for i, part, size in parts)


def model_leaves(config: ModelConfig) -> dict[str, Leaf]:
    """The leaves of a model's parameters by name, in tree order."""
    axes = [param.axes for param in jax.tree.leaves(declare(config))]
    return tree_leaves(abstract_params(config), axes)


def tree_leaves(tree: Any, axes: list[tuple[str, ...]] | None = None) -> dict[str, Leaf]:
    """The leaves of any tree of arrays or `ShapeDtypeStruct`s. axes: logical axis names per leaf, in tree order."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    names = axes if axes is not None else [() for _ in found]
    result = {}
    for (path, array), leaf_axes in zip(found, names, strict=True):
        shape, dtype = tuple(array.shape), np.dtype(array.dtype)
        stacked = leaf_axes[:1] == ("layers",)
        leaf = Leaf(leaf_name(path), shape, dtype.name, chunk_shape(shape, dtype.itemsize, leaf_axes), stacked)
        result[leaf.name] = leaf
    return result


def leaf_name(path: tuple[Any, ...]) -> str:
    """The key path of a leaf as Orbax names it: `segments.0.1.attn.q`."""
    return ".".join(str(jax.tree_util.keystr((key,), simple=True)) for key in path)


def chunk_shape(shape: tuple[int, ...], itemsize: int, axes: tuple[str, ...] = ()) -> tuple[int, ...]:
    """One layer per chunk; a layer above CHUNK_BYTES is cut into equal parts, along the axes of CUT_FIRST first."""
    first = 1 if axes[:1] == ("layers",) else 0
    chunk = [1] * first + list(shape[first:])
    preferred = [axes.index(name) for name in CUT_FIRST if name in axes]
    order = [*preferred, *sorted(range(first, len(shape)), key=lambda i: -shape[i])]
    for axis in order:
        parts = 1
        while math.prod(chunk) * itemsize > CHUNK_BYTES and chunk[axis] > 1:
            parts *= 2
            chunk[axis] = -(-shape[axis] // parts)
    return tuple(chunk)
