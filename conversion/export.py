"""Writing a model as a Hugging Face folder: the conversion's rows run backwards."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.checkpoints.workspace import check_destination, open_workspace, publish
from jaxlm.config import ModelConfig
from jaxlm.conversion import families
from jaxlm.conversion.family import Family, translated
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.folder import INDEX, SINGLE
from jaxlm.conversion.plan import Path as LeafPath
from jaxlm.conversion.plan import Step, dotted, leaves, make_plan
from jaxlm.conversion.safetensors_writer import NAMES, Entry, write_file
from jaxlm.conversion.tensors import FLOATS
from jaxlm.errors import CheckpointError, ConfigError
from jaxlm.params import Params

SHARD_BYTES = 5_000_000_000


def export_hf(
    config: ModelConfig,
    params: Params,
    original_config: Mapping[str, Any],
    dest: str | Path,
    *,
    files: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
) -> None:
    """Write config.json, safetensors of at most `shard_bytes` each, and `files` (a tokenizer's, by name) to `dest`.

    original_config is the config.json that the model came with (`Source.original`): its fields are kept, and it must
    describe `config`. Tensors keep their bits. The folder is written beside `dest` and renamed at the end. Raises
    ConfigError if the config cannot be expressed, CheckpointError for a destination that is not empty (unless force) or
    a parameter that does not fit the config.
    """
    family = families.by_model_type(original_config.get("model_type"))
    written = export_config(config, original_config, family)
    plan = make_plan(config, family.rows)
    arrays = _leaves(config, params)
    path = check_destination(dest, (), force)
    with open_workspace(path, None) as work:
        work.checkpoint.mkdir()
        (work.checkpoint / "config.json").write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n", "utf-8")
        for name, data in (files or {}).items():
            (work.checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
            (work.checkpoint / name).write_bytes(data)
        _write_tensors(work.checkpoint, plan, arrays, shard_bytes)
        publish(work.checkpoint, path, force)


def export_config(config: ModelConfig, original: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The config.json of `config`: the original's fields with the parameters' dtype, nothing said of quantisation.

    Raises ConfigError if that does not describe `config`: nothing is written that would load as another model.
    """
    written = {name: value for name, value in original.items() if name != "quantization_config"}
    written |= {name: config.dtype for name in ("torch_dtype", "dtype") if name in original}
    if "torch_dtype" not in written and "dtype" not in written:
        written["torch_dtype"] = config.dtype
    read_back = translated(family, Fields(written))
    if replace(read_back, dtype=config.dtype, precision=config.precision) != config:
        raise ConfigError("config: differs from what the model's config.json says; it cannot be exported as that model")
    return written


def _leaves(config: ModelConfig, params: Params) -> dict[LeafPath, Any]:
    """The parameters by path, checked against the config."""
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    found = {tuple(k.key if hasattr(k, "key") else k.idx for k in keys): leaf for keys, leaf in flat}
    declared = leaves(config)
    for path in declared.keys() | found.keys():
        shape = found[path].shape if path in found else None
        wanted = declared[path].shape if path in declared else None
        if shape != wanted:
            raise CheckpointError(f"parameter {dotted(path)!r} has shape {shape}; the config needs {wanted}")
        if np.dtype(found[path].dtype) not in NAMES:
            raise CheckpointError(f"parameter {dotted(path)!r} is {found[path].dtype}; allowed: {', '.join(FLOATS)}")
    return found


def _write_tensors(folder: Path, plan: tuple[Step, ...], arrays: dict[LeafPath, Any], shard_bytes: int) -> None:
    entries = [
        Entry(name, shape, np.dtype(arrays[step.slots[0].path].dtype))
        for step in plan
        for name, shape in zip(step.sources, step.shapes, strict=True)
    ]
    shards, stream = _shards(entries, shard_bytes), _encoded(plan, arrays)
    if len(shards) == 1:
        write_file(folder / SINGLE, entries, stream)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, shard, (next(stream) for _ in shard))
        weight_map |= dict.fromkeys([entry.name for entry in shard], name)
    index = {"metadata": {"total_size": sum(e.nbytes for e in entries)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _encoded(plan: tuple[Step, ...], arrays: dict[LeafPath, Any]) -> Iterator[np.ndarray]:
    """Every tensor as files have it; one leaf at a time is on the host."""
    held: dict[LeafPath, np.ndarray] = {}
    for step in plan:
        paths = {slot.path for slot in step.slots}
        held = {path: held[path] if path in held else np.asarray(arrays[path]) for path in paths}
        yield from step.transform.encode([held[slot.path][slot.index] for slot in step.slots], step.params)


def _shards(entries: list[Entry], limit: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards
