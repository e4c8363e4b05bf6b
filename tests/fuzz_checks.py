"""What must hold of a damaged checkpoint that still loads.

Its tensors are those that another reader finds in the files, and as long as that reader finds what was there before the
damage, the parameters are as before.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import safetensors

from jaxlm.conversion import open_source
from jaxlm.conversion.tensors import read_raw
from jaxlm.errors import JaxlmError
from jaxlm.params import abstract_params

TEXTS = ("", "Hello  world,\tit's 42! <|im_end|></s>", "naïve 你好 🙂\0\n\n  <0x0A>▁x", "a" * 300)


class Wrong(Exception):
    """A load that succeeded with something that it should not have given."""


def leaves(params: Any) -> dict[str, np.ndarray]:
    flat = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}


def raw_tensors(path: Path) -> dict[str, tuple[Any, ...]]:
    """(type, shape, bytes) of every tensor, as the formats' own libraries read it."""
    if path.suffix == ".gguf":
        return {
            t.name: (t.tensor_type.name, tuple(map(int, t.shape[::-1])), t.data.tobytes())
            for t in gguf.GGUFReader(path).tensors
        }
    index = path / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"] if index.exists() else None
    found = {}
    for file in sorted(set(names.values())) if names else ["model.safetensors"]:
        for name, entry in safetensors.deserialize((path / file).read_bytes()):
            if names is None or names.get(name) == file:
                found[name] = (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
    return found


def check_tensors(path: Path) -> dict[str, tuple[Any, ...]]:
    """What we find in the files is what the formats' own libraries find."""
    source = open_source(path)
    try:
        theirs = raw_tensors(path)
    except Exception as error:
        raise Wrong(f"accepted what the format's own library refuses: {error!r:.200}") from error
    ours = {name: (t.stored, t.shape, read_raw(t).tobytes()) for name, t in source.tensors.items()}
    if ours != theirs:
        raise Wrong("tensors differ from what the format's own library reads")
    if path.suffix == ".gguf":
        fields = {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}
        if repr(fields) != repr(dict(source.metadata)):
            raise Wrong("metadata differs from what the format's own library reads")
    return theirs


def check_model(model: Any) -> None:
    declared = jax.tree.map(lambda a: (a.shape, a.dtype), abstract_params(model.config))
    found = jax.tree.map(lambda a: (a.shape, a.dtype), model.params)
    if declared != found:
        raise Wrong("parameters are not of the declared shapes")
    if model.tokenizer is not None:
        check_tokenizer(model.tokenizer)


def check_same(model: Any, whole: Any) -> None:
    """The parameters of the undamaged files; where the config differs, perhaps in another order."""
    before, after = leaves(whole.params), leaves(model.params)
    shapes = ({n: a.shape for n, a in d.items()} for d in (before, after))
    if model.config != whole.config and len({repr(s) for s in shapes}) > 1:
        return
    for name, array in before.items():
        found = after.get(name)
        if model.config != whole.config and found is not None:
            array, found = np.sort(array, axis=None), np.sort(found, axis=None)
        if found is None or not np.array_equal(array, found, equal_nan=True):
            raise Wrong(f"{name} differs though the weights were not touched")


def check_tokenizer(tokenizer: Any) -> None:
    """It can be used; a tokenizer.json gives the ids that its own library gives."""
    size = tokenizer.vocab_size
    tokenizer.token_mask(64)
    for text in TEXTS:
        for special in (True, False):
            ids = _try(lambda text=text, special=special: tokenizer.encode(text, bos=False, special=special))
            if ids is None:
                continue
            if not all(0 <= i < size for i in ids):
                raise Wrong(f"encode gives {ids}, vocab_size is {size}")
            tokenizer.decode(ids)
            if special and "tokenizer.json" in tokenizer.files and ids != _library_ids(tokenizer, text):
                raise Wrong(f"encode gives {ids}, the library {_library_ids(tokenizer, text)}")
    messages = [{"role": "user", "content": TEXTS[1]}]
    _try(lambda: tokenizer.encode_chat(messages))
    tokenizer.decode([0, 5, size - 1, size, -1, 1 << 40], keep_special=True)
    Path(os.devnull).write_text(repr((tokenizer.eos_ids, tokenizer.bos_id)))


def _try(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except JaxlmError:
        return None


def _library_ids(tokenizer: Any, text: str) -> list[int]:
    import tokenizers

    core = tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    core.no_truncation()
    core.no_padding()
    if getattr(core.model, "dropout", None) is not None:
        core.model.dropout = None
    return core.encode(text, add_special_tokens=False).ids
