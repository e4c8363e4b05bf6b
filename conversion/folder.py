"""A Hugging Face folder: its config.json, and its tensors' headers from one file or from the shards of an index."""

from pathlib import Path
from typing import Any

from jaxlm.conversion.json_file import read_json
from jaxlm.conversion.safetensors_reader import read_header
from jaxlm.conversion.tensors import TensorInfo
from jaxlm.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: has no config.json; a Hugging Face folder has one beside its safetensors")
    return read_json(folder / "config.json", 8 << 20)


def read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor that the folder's weights are made of, by name. With an index, only what the index names counts."""
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    for name in PICKLES:
        if (folder / name).exists():
            raise CheckpointError(
                f"{folder}: has only {name}, which can run code when read; load it once with transformers and write it "
                "again with save_pretrained, which makes safetensors"
            )
    raise CheckpointError(f"{folder}: has no weights; allowed: {SINGLE} or {INDEX}")


def _read_shards(folder: Path) -> dict[str, TensorInfo]:
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{folder / INDEX}: weight_map is {str(places)[:80]}; allowed: tensor names and files")
    shards: dict[str, dict[str, TensorInfo]] = {}
    tensors = {}
    for name, file in places.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{folder / INDEX}: the entry of {name!r} is {str(file)[:80]}; allowed: a file name")
        if file not in shards:
            shards[file] = read_header(_inside(folder, file, name))
        if name not in shards[file]:
            raise CheckpointError(f"{folder / INDEX}: tensor {name!r} is not in {file}")
        tensors[name] = shards[file][name]
    return tensors


def _inside(folder: Path, file: str, name: str) -> Path:
    """The shard's path, refused if it is not a file inside the folder, or in the blobs of the same hub download."""
    where = f"{folder / INDEX}: the entry of {name!r} is {file!r}"
    if not file.isprintable() or not file or Path(file).is_absolute() or ".." in Path(file).parts:
        raise CheckpointError(f"{where}; allowed: a name inside the folder")
    path, root = folder / file, folder.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(path.resolve().is_relative_to(place) for place in allowed):
        raise CheckpointError(f"{where}, a link that leaves the folder; allowed: a file inside the folder")
    if not path.is_file():
        raise CheckpointError(f"{where}, but there is no such file")
    return path
