"""`load` and `convert`: whatever kind of checkpoint it is, a `Model` or a jaxlm checkpoint comes out."""

import dataclasses
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from jaxlm.checkpoints import (
    DEFAULT,
    Checkpoint,
    is_checkpoint,
    plan_write,
    read_checkpoint,
    resolve,
    restore_params,
    write_checkpoint,
)
from jaxlm.checkpoints.workspace import check_destination
from jaxlm.config import DTYPES
from jaxlm.conversion import config_for, layer_tensors, load_params, load_quantised, open_source
from jaxlm.conversion.export import export_hf
from jaxlm.errors import JaxlmTypeError, RequestError
from jaxlm.generate import Model
from jaxlm.tokenizer import Tokenizer

Progress = Callable[..., None]  # (bytes done, bytes in all, ...)


def load(
    source: str | Path = DEFAULT,
    *,
    dtype: str | None = None,
    mesh: Any = None,
    quantize: str | None = None,
    progress: Progress | None = None,
) -> Model:
    """A model ready to run, from a Hugging Face folder, a GGUF file, a jaxlm checkpoint, a known name or a hub id.

    dtype: "float32", "bfloat16" or "float16"; None keeps the file's (float32 for what a GGUF file stores in blocks).
    quantize: "int8" or "int4" rounds the large matrices, 32 neighbours sharing a scale, "fp8" to 8-bit floats with a
    scale per row; "file" keeps the blocks of a GGUF file as they are stored; activations stay in dtype.
    progress is called with the bytes done and the bytes in all. Raises CheckpointError, ConfigError or TokenizerError,
    which name the file, tensor or field, for anything missing, damaged or not understood.
    """
    check_dtype(dtype)
    if mesh is not None:
        raise RequestError("load: mesh is not supported yet; allowed: None")
    path = find(source)
    if not is_checkpoint(path):
        return load_foreign(path, str(source), dtype, quantize, progress)
    if quantize is not None:
        raise RequestError(f"quantize is {quantize!r}, but {path} is a jaxlm checkpoint; load the original instead")
    return load_checkpoint(path, str(source), dtype, progress)


def load_checkpoint(path: Path, name: str, dtype: str | None, progress: Progress | None) -> Model:
    """From jaxlm's own format."""
    checkpoint = read_checkpoint(path)
    files = kept_files(checkpoint)
    tokenizer = Tokenizer.from_files(files) if files else None
    config = dataclasses.replace(checkpoint.config, dtype=dtype or checkpoint.config.dtype)
    params = restore_params(checkpoint, dtype=dtype, progress=progress)
    return Model(config, params, tokenizer, all_eos_ids(tokenizer, checkpoint.eos_ids), name)


def load_foreign(
    path: Path, name: str, dtype: str | None, quantize: str | None, progress: Progress | None
) -> Model:
    """From a Hugging Face folder or a GGUF file."""
    source = open_source(path)
    tokenizer = Tokenizer.from_files(source.tokenizer_files) if source.tokenizer_files else None
    if quantize is None:
        config, params = load_params(source, dtype, progress)
    else:
        config, params = load_quantised(source, quantize, dtype, progress)
    return Model(config, params, tokenizer, all_eos_ids(tokenizer, source.eos_ids), name)


def kept_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The tokenizer files of a checkpoint, by name."""
    return {name: checkpoint.read_file(name) for name in checkpoint.tokenizer_files}


def all_eos_ids(tokenizer: Tokenizer | None, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Every id that any of the checkpoint's files names as an end."""
    return tuple(dict.fromkeys((*(tokenizer.eos_ids if tokenizer else ()), *ids)))


def convert(
    source: str | Path,
    dest: str | Path,
    *,
    dtype: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
    report: Callable[[str], None] | None = None,
) -> Path:
    """Write a jaxlm checkpoint of a Hugging Face folder or a GGUF file, tensor by tensor; -> its folder.

    Written beside `dest` and renamed when complete; run again after an interruption, it goes on where it stopped.
    report is given one line on the memory and disk needed before anything is written. Raises CheckpointError for a
    `dest` that holds something (unless force) and for what `load` refuses.
    """
    check_dtype(dtype)
    path = find(source)
    if is_checkpoint(path):
        raise RequestError(f"{path} is a jaxlm checkpoint already; allowed: a Hugging Face folder or a .gguf file")
    check_destination(dest, [path], force)
    opened = open_source(path)
    config = config_for(opened, dtype)
    if opened.tokenizer_files:
        Tokenizer.from_files(opened.tokenizer_files)  # A vocabulary that cannot be read is found before any work.
    plan = plan_write(config)
    if report:
        report(f"needs {size(plan.disk_bytes)} of disk and {size(plan.largest_tensor_bytes)} of memory for a tensor")
    checkpoint = write_checkpoint(
        dest, config, layer_tensors(opened, dtype), tokenizer_files=opened.tokenizer_files,
        source_config=opened.original or None, eos_ids=opened.eos_ids, source=str(source), source_paths=[path],
        force=force, progress=progress,
    )  # fmt: skip
    return checkpoint.path


def export(
    source: str | Path, dest: str | Path, *, force: bool = False, progress: Progress | None = None
) -> Path:
    """Write a Hugging Face folder that transformers loads, tokenizer files included; -> the folder.

    Weights keep the source's dtype and bits (what a GGUF file stores in blocks becomes float32). Raises CheckpointError
    for a `dest` that holds something (unless force), ConfigError for a model whose config cannot be written.
    """
    path = find(source)
    check_destination(dest, [path], force)
    original: Mapping[str, Any] | None
    if is_checkpoint(path):
        checkpoint = read_checkpoint(path)
        original, files = checkpoint.source_config, kept_files(checkpoint)
        config, params = checkpoint.config, restore_params(checkpoint, progress=progress)
    else:
        opened = open_source(path)
        original, files = opened.original, opened.tokenizer_files
        config, params = load_params(opened, None, progress)
    if files:
        Tokenizer.from_files(files)  # A vocabulary that cannot be read is not passed on.
    export_hf(config, params, original or {}, dest, files=files, force=force)
    return Path(dest)


def find(source: Any) -> Path:
    """The file or folder that a source means."""
    if not isinstance(source, (str, PathLike)):
        raise JaxlmTypeError(f"source is {source!r}; allowed: a path, a known name or a hub id")
    return resolve(source)  # type: ignore[arg-type]


def check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise RequestError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")


def size(nbytes: int) -> str:
    """1234567 -> "1.2 MB"."""
    amount, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
