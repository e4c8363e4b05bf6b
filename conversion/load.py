"""Loading: one stacked leaf after another, tensor by tensor, so that memory holds the model and little else."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.checkpoints.arrays import aligned_empty
from jaxlm.config import DTYPES, ModelConfig
from jaxlm.conversion import plan
from jaxlm.conversion.plan import Step, leaves
from jaxlm.conversion.source import Source, open_source
from jaxlm.conversion.tensors import TensorInfo, read, read_raw
from jaxlm.conversion.transforms import Same
from jaxlm.errors import CheckpointError, ConfigError
from jaxlm.params import Param, Params, declare

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Loaded:
    """A model in memory. config.dtype is the dtype of every leaf."""

    config: ModelConfig
    params: Params
    source: Source


def load_source(path: str | Path, dtype: str | None = None, progress: Progress | None = None) -> Loaded:
    """Open and load a Hugging Face folder or a GGUF file. Errors as in `open_source` and `load_params`."""
    source = open_source(path)
    return Loaded(*load_params(source, dtype, progress), source)


def config_for(source: Source, dtype: str | None = None) -> ModelConfig:
    """The source's config with parameters of `dtype`; None keeps the file's."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
    return replace(source.config, dtype=dtype or source.config.dtype)


def load_params(
    source: Source,
    dtype: str | None = None,
    progress: Progress | None = None,
    put: Callable[[np.ndarray], Any] = jax.device_put,
) -> tuple[ModelConfig, Params]:
    """`config_for(source, dtype)` and its parameter tree.

    Each leaf is filled in host memory, aligned so that `put` need not copy it on a CPU, then handed to `put`.
    progress is called with (bytes read, bytes to read). Raises CheckpointError if a file is cut off, if a tied head
    differs from the embeddings, or if a value does not fit float16.
    """
    config = config_for(source, dtype)
    check_copies(source)
    shapes = {path: param.shape for path, param in leaves(config).items()}
    left = Counter(slot.path for step in source.plan for slot in step.slots)
    done: dict[plan.Path, Any] = {}
    buffers: dict[plan.Path, np.ndarray] = {}
    read_bytes, total = 0, sum(source.tensors[n].nbytes for step in source.plan for n in step.sources)
    for step in source.plan:
        for slot in step.slots:
            if slot.path not in buffers:
                buffers[slot.path] = aligned_empty(shapes[slot.path], jnp.dtype(config.dtype))
        _fill(source, step, [buffers[slot.path][slot.index] for slot in step.slots])
        left.subtract(slot.path for slot in step.slots)
        for path in [slot.path for slot in step.slots if not left[slot.path]]:
            done[path] = put(buffers.pop(path))
        read_bytes += sum(source.tensors[name].nbytes for name in step.sources)
        if progress:
            progress(read_bytes, total)
    ordered = iter([done[path] for path in shapes])
    return config, jax.tree.map(lambda _: next(ordered), declare(config), is_leaf=lambda leaf: isinstance(leaf, Param))


def layer_tensors(
    source: Source, dtype: str | None = None
) -> Iterator[tuple[str, int | None, Callable[[], np.ndarray]]]:
    """(dotted leaf name, layer within a stacked leaf or None, a function that reads that slice in the asked dtype).

    All layers of a leaf come in one run; leaves that share a tensor of the file come in turns. Memory holds what the
    function just called returned, and nothing when it was not called.
    """
    wanted = jnp.dtype(config_for(source, dtype).dtype)
    shapes = {path: param.shape for path, param in leaves(source.config).items()}
    check_copies(source)
    for (_, layer), group in itertools.groupby(source.plan, lambda s: (s.slots[0].path, s.slots[0].index[:1])):
        steps = tuple(group)
        make = functools.cache(functools.partial(_layer, source, steps, shapes, wanted))
        for slot in steps[0].slots:
            yield plan.dotted(slot.path), layer[0] if layer else None, functools.partial(_pick, make, slot.path)


def _pick(make: Callable[[], dict[plan.Path, np.ndarray]], path: plan.Path) -> np.ndarray:
    return make()[path]


def _layer(
    source: Source, steps: tuple[Step, ...], shapes: dict[plan.Path, tuple[int, ...]], dtype: np.dtype
) -> dict[plan.Path, np.ndarray]:
    """What some steps of one layer fill, by leaf."""
    buffers = {s.path: aligned_empty(shapes[s.path][len(s.index[:1]) :], dtype) for s in steps[0].slots}
    for step in steps:
        _fill(source, step, [buffers[slot.path][slot.index[1:]] for slot in step.slots])
    return buffers


def check_copies(source: Source) -> None:
    """Refuse a tied model whose file holds a head that differs from the embeddings."""
    for head, embedding in source.copies:
        _check_copy(source.tensors[head], source.tensors[embedding])


def _fill(source: Source, step: Step, parts: list[np.ndarray]) -> None:
    """Read the step's tensors into `parts`, the slices that its slots name; without a copy where nothing changes."""
    infos = [source.tensors[name] for name in step.sources]
    if isinstance(step.transform, Same) and all(i.dtype == p.dtype for i, p in zip(infos, parts, strict=True)):
        for info, part in zip(infos, parts, strict=True):
            read(info, out=part)
        return
    for array, part in zip(_decode(source, step), parts, strict=True):
        _cast(array, part, step)


def _decode(source: Source, step: Step) -> list[np.ndarray]:
    infos = [source.tensors[name] for name in step.sources]
    return step.transform.decode([read_raw(i) if i.dtype is None else read(i) for i in infos], step.params)


def _cast(array: np.ndarray, out: np.ndarray, step: Step) -> None:
    """Copy into `out`, to its dtype; refused where a finite value would become infinite."""
    if array.dtype == out.dtype or out.dtype != np.float16:
        np.copyto(out, array, casting="unsafe")
        return
    with np.errstate(over="ignore"):
        np.copyto(out, array.astype(np.float32, copy=False), casting="unsafe")
    if not np.isfinite(out).all() and np.isfinite(array.astype(np.float32, copy=False)).all():
        raise CheckpointError(f"tensor {step.sources[0]!r} has values beyond 65504, the largest float16")


def _check_copy(head: TensorInfo, embedding: TensorInfo) -> None:
    """Compare two tensors piece by piece."""
    same = head.stored == embedding.stored
    for start in range(0, head.size, 1 << 24) if same else ():
        count = min(1 << 24, head.size - start) * (head.nbytes // head.size)
        pieces = [replace(t, offset=t.offset + start * (t.nbytes // t.size), nbytes=count) for t in (head, embedding)]
        same = same and np.array_equal(read_raw(pieces[0]), read_raw(pieces[1]))
    if not same:
        raise CheckpointError(
            f"tensor {head.name!r} differs from {embedding.name!r}, but the config ties them; if the head was trained "
            "on its own, config.json must say tie_word_embeddings false"
        )
