"""Hugging Face tensors written as a GGUF file, by the rules of llama.cpp's converter.

Names come from the gguf package; what a family's converter does beyond the common rules is said in its `Gguf`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from foreign import save_gguf

Tensors = dict[str, np.ndarray]
# Metadata -> the fields of config.json that it may come from.
COMMON = {
    "block_count": ("num_hidden_layers", "n_layer", "num_layers"),
    "context_length": ("max_position_embeddings", "n_positions", "n_ctx"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon"),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
}
ROPE = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


@dataclass(frozen=True)
class Gguf:
    """How a family is written.

    metadata: more entries, from config.json (None takes one out). tensors: what is done to the Hugging Face tensors
    before they are named. names: Hugging Face name without its ending -> GGUF name where the package has none.
    paired: q and k rows are laid out for the rotation of neighbouring lanes. cases: names of the cases to run, () for
    all. exact: whether an export from the file gives back every bit of the Hugging Face tensors.
    """

    arch: str
    metadata: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    tensors: Callable[[Tensors, Mapping[str, Any]], Tensors] = lambda tensors, config: tensors
    names: Mapping[str, str] | None = None
    paired: bool = False
    cases: tuple[str, ...] = ()
    exact: bool = True


def write_gguf(path: Path, how: Gguf, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """The model as a GGUF file."""
    tensors = how.tensors(tensors, config)
    if how.paired:
        tensors = {name: pair(name, a, config) for name, a in tensors.items()}
    metadata = common_metadata(config) | dict(how.metadata(config))
    metadata = {key: value for key, value in metadata.items() if value is not None}
    layers = int(metadata["block_count"])
    named = {gguf_name(how, name, layers): a for name, a in stacked_experts(tensors).items()}
    return save_gguf(path, how.arch, metadata, named)


def common_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the converter writes for every family."""
    values = {key: next((config[n] for n in names if config.get(n) is not None), None) for key, names in COMMON.items()}
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        values["rope.freq_base"] = float(rope["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        values |= {key: rope[name] for key, name in ROPE.items() if rope.get(name) is not None}
    return {key: value for key, value in values.items() if value is not None}


def pair(name: str, array: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Rows of q and k so that lane i and lane i + h/2 of each head lie side by side."""
    part = re.search(r"\.([qk])_proj\.(weight|bias)$", name)
    if not part:
        return array
    heads = config["num_attention_heads"] if part[1] == "q" else config["num_key_value_heads"]
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return np.swapaxes(halves, 1, 2).reshape(array.shape)


def stacked_experts(tensors: Tensors) -> Tensors:
    """`...experts.N.x.weight` of all N as one `...experts.x.weight`."""
    numbered: dict[str, dict[int, np.ndarray]] = {}
    rest: Tensors = {}
    for name, array in tensors.items():
        part = re.search(r"\.experts\.(\d+)\.", name)
        if part:
            numbered.setdefault(name.replace(part[0], ".experts."), {})[int(part[1])] = array
        else:
            rest[name] = array
    return rest | {name: np.stack([parts[e] for e in sorted(parts)]) for name, parts in numbered.items()}


def gguf_name(how: Gguf, name: str, layers: int) -> str:
    """The package's name for a Hugging Face tensor; refused where it has none."""
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == how.arch)
    stem, _, ending = name.rpartition(".")
    if ending not in ("weight", "bias"):
        stem, ending = name, ""
    own = {key.format(i=i): value.format(i=i) for key, value in (how.names or {}).items() for i in range(layers)}
    known = own.get(stem) or gguf.get_tensor_name_map(arch, layers).get_name(stem)
    assert known, f"the gguf package has no name for {name!r} in {how.arch}"
    return f"{known}.{ending or 'weight'}"


def ungrouped(tensors: Tensors, groups: int, rows: int = 1) -> Tensors:
    """Fused q, k and v that lie group by group (`rows` query heads, one key, one value): all q, then all k, all v."""
    def whole(array: np.ndarray) -> np.ndarray:
        parts = array.reshape(groups, rows + 2, -1, *array.shape[1:])
        split = (parts[:, :rows], parts[:, rows], parts[:, rows + 1])
        return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in split])

    return {name: whole(a) if "query_key_value" in name else a for name, a in tensors.items()}
