"""The plan of a conversion: which tensors become which slices of which leaves, settled before any tensor is read.

Made from the config, a family's rows and the file's headers alone. Each slice is filled exactly once and each tensor
used exactly once, or named as ignored; whatever does not fit is refused by name.
"""

import fnmatch
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxlm.config import ModelConfig
from jaxlm.conversion.family import Row
from jaxlm.conversion.tensors import TensorInfo
from jaxlm.conversion.transforms import Shape, Transform
from jaxlm.errors import CheckpointError
from jaxlm.params import Param, declare

Path = tuple[str | int, ...]
IGNORED = ("*rotary_emb.inv_freq",)  # Recomputed from the config by everyone.


@dataclass(frozen=True)
class Slot:
    """A slice of a leaf: leaf[index], and the declaration of that slice alone."""

    path: Path
    index: tuple[int, ...]
    param: Param


@dataclass(frozen=True)
class Step:
    """Some tensors of the file become some slices of leaves."""

    sources: tuple[str, ...]
    slots: tuple[Slot, ...]
    transform: Transform

    @property
    def params(self) -> list[Param]:
        return [slot.param for slot in self.slots]

    @property
    def shapes(self) -> list[Shape]:
        """The shapes that the sources must have."""
        return self.transform.shapes(self.params)


def dotted(path: Path) -> str:
    """A leaf's name as people write it: "segments.0.0.attn.q"."""
    return ".".join(map(str, path))


def leaves(config: ModelConfig) -> dict[Path, Param]:
    """Every leaf of the parameter tree by its path, stacked as it is kept."""
    return _flatten(declare(config))


def make_plan(
    config: ModelConfig,
    rows: tuple[Row, ...],
    tensors: Mapping[str, TensorInfo] | None = None,
    ignored: Collection[str] = (),
) -> tuple[Step, ...]:
    """The steps, leaf after leaf. tensors None plans an export: the first row of each target, no file to agree with.

    Raises CheckpointError naming a tensor that is missing, extra, of the wrong shape or of a type without weights.
    """
    rows = tuple(row for row in rows if row.when(config))
    steps = [step for slots, per_layer, i in _places(config) for step in _steps(slots, per_layer, i, rows, tensors)]
    if tensors is not None:
        used = [name for step in steps for name in step.sources]
        _check_shapes(steps, tensors)
        _check_unused(tensors, used, config, (*IGNORED, *ignored))
    order = {path: n for n, path in enumerate(leaves(config))}
    return tuple(sorted(steps, key=lambda s: (order[s.slots[0].path], s.slots[0].index)))


def _flatten(tree: Any) -> dict[Path, Param]:
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, Param))[0]
    return {tuple(k.key if hasattr(k, "key") else k.idx for k in keys): param for keys, param in flat}


def _places(config: ModelConfig) -> Iterator[tuple[dict[str, Slot], bool, int]]:
    """(the slots of one layer or of what surrounds the layers by dotted name, whether a layer, its number)."""
    flat = leaves(config)
    yield {dotted(p): Slot(p, (), param) for p, param in flat.items() if p[0] != "segments"}, False, 0
    number = 0
    for s, segment in enumerate(config.segments):
        units: list[dict[Path, Param]] = [{} for _ in segment.unit]
        for path, param in flat.items():
            if path[:2] == ("segments", s):
                units[int(path[2])][path] = Param(param.shape[1:], param.axes[1:], param.init)
        for repeat in range(segment.repeat):
            for unit in units:
                yield {dotted(p[3:]): Slot(p, (repeat,), a) for p, a in unit.items()}, True, number
                number += 1


def _steps(
    slots: dict[str, Slot], per_layer: bool, layer: int, rows: tuple[Row, ...], tensors: Mapping[str, TensorInfo] | None
) -> Iterator[Step]:
    """The steps that fill these slots."""
    usable = [row for row in rows if row.per_layer == per_layer and all(t in slots for t in row.targets)]
    unfilled = dict.fromkeys(slots)
    for row in usable:
        steps = _expand(row, [slots[t] for t in row.targets], layer)
        present = tensors is None or all(name in tensors for step in steps for name in step.sources)
        if present and all(t in unfilled for t in row.targets):
            for target in row.targets:
                del unfilled[target]
            yield from steps
    for target in unfilled:
        options = [_expand(r, [slots[t] for t in r.targets], layer) for r in usable if target in r.targets]
        _missing(target, options, tensors)


def _missing(target: str, options: list[list[Step]], tensors: Mapping[str, TensorInfo] | None) -> None:
    """Name the tensor whose absence leaves the target empty: of the row that is most nearly complete."""
    if not options:
        raise CheckpointError(f"no row of this family's table gives {target!r}")
    absent = [[n for step in steps for n in step.sources if n not in (tensors or {})] for steps in options]
    raise CheckpointError(f"tensor {min(absent, key=len)[0]!r} is missing: {target!r} needs it")


def _expand(row: Row, slots: list[Slot], layer: int) -> list[Step]:
    """The row for one layer: one step, or one per expert."""
    if not row.per_expert:
        return [Step(tuple(s.format(i=layer) for s in row.sources), tuple(slots), row.transform)]
    steps = []
    for e in range(slots[0].param.shape[0]):
        parts = [Slot(s.path, (*s.index, e), Param(s.param.shape[1:], s.param.axes[1:], s.param.init)) for s in slots]
        steps.append(Step(tuple(s.format(i=layer, e=e) for s in row.sources), tuple(parts), row.transform))
    return steps


def _check_shapes(steps: list[Step], tensors: Mapping[str, TensorInfo]) -> None:
    for step in steps:
        accepted = getattr(step.transform, "stored", ())  # A transform may read other types than floats.
        for name, shape in zip(step.sources, step.shapes, strict=True):
            info = tensors[name]
            if info.shape != shape:
                raise CheckpointError(f"tensor {name!r} has shape {list(info.shape)}; the config needs {list(shape)}")
            if info.dtype is None and info.stored not in accepted:
                raise CheckpointError(f"tensor {name!r} has type {info.stored}; allowed: F32, F16, BF16, GGUF blocks")


def _check_unused(
    tensors: Mapping[str, TensorInfo], used: list[str], config: ModelConfig, ignored: tuple[str, ...]
) -> None:
    twice = {name for name in used if used.count(name) > 1} if len(set(used)) < len(used) else ()
    for name in twice:
        raise CheckpointError(f"tensor {name!r} would fill two places")
    for name in sorted(tensors.keys() - set(used)):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored):
            raise CheckpointError(f"tensor {name!r} is in the file but this model has no place for it")
