"""Reading JSON that others wrote: bounded in size, no name twice, and one clear error for whatever is wrong."""

import json
from pathlib import Path
from typing import Any

from jaxlm.errors import CheckpointError


def read_json(path: Path, limit: int = 64 << 20) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes."""
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= limit else b""
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if size > limit:
        raise CheckpointError(f"{path}: has {size} bytes; allowed: at most {limit}")
    return parse_json(data, str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`. Raises CheckpointError if it is anything else, or names a field twice."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except _Twice as error:
        raise CheckpointError(f"{where}: {error.args[0]!r} is there twice") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds a JSON {type(value).__name__}; allowed: an object")
    return value


class _Twice(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise _Twice(name)
        result[name] = value
    return result
