"""Opening what others published: headers and config only, everything checked, nothing loaded."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxlm.config import ModelConfig
from jaxlm.conversion import families, folder
from jaxlm.conversion.family import Family, Row, described, translated
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import SETTINGS, architecture, gguf_config
from jaxlm.conversion.gguf_reader import read_gguf
from jaxlm.conversion.plan import Step, make_plan
from jaxlm.conversion.tensors import TensorInfo
from jaxlm.errors import CheckpointError, ConfigError
from jaxlm.tokenizer import TOKENIZER_FILES

END_IDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
TOKENIZER_LIMIT = 256 << 20


@dataclass(frozen=True)
class Source:
    """A checkpoint of others, opened and found complete.

    config.dtype is that of the file. tensors describes what the plan's steps read; copies holds pairs of tensors that
    must be equal, (a tied head, the embeddings). original is config.json: as published, that of the language model
    alone, or as it would be for a GGUF file ({} for a family that cannot say). metadata is that of a GGUF file.
    """

    path: Path
    kind: Literal["hf", "gguf"]
    family: Family
    config: ModelConfig
    plan: tuple[Step, ...]
    tensors: Mapping[str, TensorInfo]
    copies: tuple[tuple[str, str], ...]
    original: Mapping[str, Any]
    eos_ids: tuple[int, ...]
    metadata: Mapping[str, Any]

    @property
    def files(self) -> dict[str, int]:
        """The size in bytes of every file that holds weights."""
        return {str(p): p.stat().st_size for p in sorted({t.path for t in self.tensors.values()})}

    @functools.cached_property
    def tokenizer_files(self) -> dict[str, bytes]:
        """The contents of the tokenizer's files; of a GGUF file, those made from the vocabulary inside it."""
        if self.kind == "gguf":
            from jaxlm.conversion.gguf_vocab import tokenizer_files

            return tokenizer_files(self.metadata)
        return {name: _read_small(self.path / name) for name in TOKENIZER_FILES if (self.path / name).is_file()}


def open_source(path: str | Path) -> Source:
    """Open a Hugging Face folder or a .gguf file and settle how every tensor will be used.

    Raises ConfigError for a config that is not understood and CheckpointError for files that are damaged, incomplete or
    do not fit the config.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist; allowed: a Hugging Face folder or a .gguf file")
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path}: is not a folder and its name does not end in .gguf")
    return _open_gguf(path)


def _open_folder(path: Path) -> Source:
    original = families.language_model(folder.read_config(path))
    family = families.by_model_type(original.get("model_type"))
    check_purpose(original, family)
    config = translated(family, Fields(original))
    tensors = folder.read_tensors(path)
    plan, copies = _plan(config, _renamed(family, tensors), tensors, (*family.ignored, *family.unused(config)))
    config = replace(config, dtype=stored_dtype(plan, tensors))
    eos = _ids(original.get("eos_token_id"))
    return Source(path, "hf", family, config, plan, tensors, copies, original, eos, {})


def _open_gguf(path: Path) -> Source:
    metadata, tensors = read_gguf(path)
    if metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(f"{path}: is one of {metadata['split.count']} parts; merge them into one file first")
    family = families.by_gguf(architecture(metadata), gguf_config(metadata, tensors))
    config = translated(family, gguf_config(metadata, tensors, family))
    plan, copies = _plan(config, family.gguf_rows, tensors, (*family.ignored, *family.unused(config), *SETTINGS))
    config = replace(config, dtype=stored_dtype(plan, tensors))
    eos = tuple(dict.fromkeys(i for key in END_IDS for i in _ids(metadata.get(key))))
    original = described(family, config, eos, _ids(metadata.get("tokenizer.ggml.bos_token_id")))
    return Source(path, "gguf", family, config, plan, tensors, copies, original, eos, metadata)


def check_purpose(original: Mapping[str, Any], family: Family) -> None:
    """Refuse a config of a quantised model, or of one that is not a causal language model."""
    quantization = original.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        if method not in family.quantization:
            found = f"field 'quantization_config' has quant_method {str(method)[:80]!r}"
            raise ConfigError(f"config.json: {found}; allowed: {', '.join(family.quantization) or 'no quantisation'}")
    names = original.get("architectures") or family.architectures
    if not isinstance(names, (list, tuple)) or not set(map(str, names)) & set(family.architectures):
        allowed = ", ".join(family.architectures)
        raise ConfigError(f"config.json: field 'architectures' is {str(names)[:80]}; allowed: {allowed}")


def stored_dtype(plan: tuple[Step, ...], tensors: Mapping[str, TensorInfo]) -> str:
    """The narrowest dtype that holds every matrix of the file as it is."""
    infos = [tensors[name] for step in plan for name in step.sources]
    infos = [i for i in infos if i.dtype is not None]  # Packed bytes become what the rest is.
    dtypes = {i.dtype for i in infos if len(i.shape) > 1} or {i.dtype for i in infos}
    names = {np.dtype(dtype).name for dtype in dtypes}
    return names.pop() if len(names) == 1 else "float32"


def _plan(
    config: ModelConfig, rows: tuple[Row, ...], tensors: dict[str, TensorInfo], ignored: tuple[str, ...]
) -> tuple[tuple[Step, ...], tuple[tuple[str, str], ...]]:
    """The steps, and the pairs (head, embeddings) that a tied model's file holds twice."""
    heads = [row.sources[0] for row in rows if config.tie_embeddings and row.targets == ("lm_head.table",)]
    plan = make_plan(config, rows, tensors, (*ignored, *heads))
    embedding = next(step.sources[0] for step in plan if step.slots[0].path == ("embed", "table"))
    copies = tuple((head, embedding) for head in heads if head in tensors)
    for head, _ in copies:
        if tensors[head].shape != tensors[embedding].shape:
            found = f"shape {list(tensors[head].shape)}, {embedding!r} {list(tensors[embedding].shape)}"
            raise CheckpointError(f"tensor {head!r} has {found}; the config says that they are tied")
    return plan, copies


def _renamed(family: Family, tensors: Mapping[str, TensorInfo]) -> tuple[Row, ...]:
    """The family's rows with the longest of its prefixes that the file uses."""
    ours = family.prefixes[0]
    used = [p for p in sorted(family.prefixes, key=len, reverse=True) if any(n.startswith(p) for n in tensors)]
    if not used or used[0] == ours:
        return family.rows

    def rename(name: str) -> str:
        return used[0] + name.removeprefix(ours) if name.startswith(ours) else name

    return tuple(replace(row, source=tuple(map(rename, row.sources))) for row in family.rows)


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if type(v) is int and v >= 0)


def _read_small(path: Path) -> bytes:
    if path.stat().st_size > TOKENIZER_LIMIT:
        raise CheckpointError(f"{path}: has {path.stat().st_size} bytes; allowed: at most {TOKENIZER_LIMIT}")
    return path.read_bytes()
