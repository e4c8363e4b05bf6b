"""GGUF's names: its metadata under the field names of config.json, and its tensors as rows.

Names of tensors and of what an architecture may hold come from the gguf package; the meaning of each is said here once.
"""

from collections.abc import Mapping
from typing import Any

import gguf

from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.tensors import TensorInfo, read
from jaxlm.conversion.transforms import Same, Transform
from jaxlm.errors import CheckpointError, ConfigError

# Metadata without the architecture's prefix -> config.json. A family's own table wins over this one.
FIELDS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_used_count": "num_experts_per_tok",
    "feed_forward_length": "intermediate_size",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
# rope.scaling.* -> keys of rope_scaling. Others keep their name, which no kind of scaling reads.
SCALING = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_log_multiplier": "mscale_all_dim",
}
# gguf's tensor names -> leaves of the parameter tree, the weight and the bias of each.
TARGETS = {
    "token_embd": ("embed.table", ""),
    "token_embd_norm": ("embed.norm.scale", "embed.norm.bias"),
    "position_embd": ("embed.positions", ""),
    "output": ("lm_head.table", "lm_head.bias"),
    "output_norm": ("final_norm.scale", "final_norm.bias"),
    "blk.{bid}.attn_norm": ("attn_norm.scale", "attn_norm.bias"),
    "blk.{bid}.attn_q": ("attn.q", "attn.q_bias"),
    "blk.{bid}.attn_k": ("attn.k", "attn.k_bias"),
    "blk.{bid}.attn_v": ("attn.v", "attn.v_bias"),
    "blk.{bid}.attn_output": ("attn.o", "attn.o_bias"),
    "blk.{bid}.attn_q_norm": ("attn.q_norm.scale", "attn.q_norm.bias"),
    "blk.{bid}.attn_k_norm": ("attn.k_norm.scale", "attn.k_norm.bias"),
    "blk.{bid}.attn_sinks": ("attn.sinks", ""),
    "blk.{bid}.post_attention_norm": ("attn_post_norm.scale", "attn_post_norm.bias"),
    "blk.{bid}.ffn_norm": ("ffn_norm.scale", "ffn_norm.bias"),
    "blk.{bid}.ffn_gate": ("ffn.gate", "ffn.gate_bias"),
    "blk.{bid}.ffn_up": ("ffn.up", "ffn.up_bias"),
    "blk.{bid}.ffn_down": ("ffn.down", "ffn.down_bias"),
    "blk.{bid}.ffn_gate_inp": ("ffn.router.weight", "ffn.router.bias"),
    "blk.{bid}.exp_probs_b": ("", "ffn.router.correction"),
    "blk.{bid}.ffn_gate_exps": ("ffn.experts.gate", "ffn.experts.gate_bias"),
    "blk.{bid}.ffn_up_exps": ("ffn.experts.up", "ffn.experts.up_bias"),
    "blk.{bid}.ffn_down_exps": ("ffn.experts.down", "ffn.experts.down_bias"),
    "blk.{bid}.ffn_gate_shexp": ("ffn.shared.gate", ""),
    "blk.{bid}.ffn_up_shexp": ("ffn.shared.up", ""),
    "blk.{bid}.ffn_down_shexp": ("ffn.shared.down", ""),
    "blk.{bid}.ffn_gate_inp_shexp": ("ffn.shared_gate", ""),
    "blk.{bid}.post_ffw_norm": ("ffn_post_norm.scale", "ffn_post_norm.bias"),
}
# Tensors that hold settings rather than weights, and the field under which a family's `translate` finds them.
SETTINGS = {
    "rope_freqs.weight": "rope_freqs",
    "rope_factors_long.weight": "rope_factors_long",
    "rope_factors_short.weight": "rope_factors_short",
}
MAX_SETTINGS = 65536


def gguf_rows(
    arch: str,
    transforms: Mapping[str, Transform] | None = None,
    targets: Mapping[str, tuple[str, str]] | None = None,
) -> tuple[Row, ...]:
    """The rows of every tensor that the gguf package knows of an architecture and that `TARGETS` gives a meaning.

    transforms: target -> how its array is stored, where not as it is. targets: entries that differ from `TARGETS`.
    """
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    how, meanings, rows = transforms or {}, {**TARGETS, **(targets or {})}, []
    for kind in gguf.MODEL_TENSORS[number]:
        name = gguf.TENSOR_NAMES[kind]
        for target, suffix in zip(meanings.get(name, ()), (".weight", ".bias"), strict=False):
            if target:
                rows.append(Row(target, name.replace("{bid}", "{i}") + suffix, how.get(target, Same())))
    return tuple(rows)


def architecture(metadata: Mapping[str, Any]) -> str:
    """general.architecture."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise CheckpointError(f"GGUF metadata general.architecture is {arch!r}; allowed: the name of an architecture")
    return arch


def gguf_config(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], family: Family | None = None) -> Fields:
    """The metadata as fields of a config.json, with what the tensors say of it (tied head, vocabulary, frequencies)."""
    arch = architecture(metadata)
    own = {key.removeprefix(arch + "."): value for key, value in metadata.items() if key.startswith(arch + ".")}
    fields: dict[str, Any] = {"tie_word_embeddings": "output.weight" not in tensors}
    if "vocab_size" not in own and "token_embd.weight" in tensors:
        fields["vocab_size"] = tensors["token_embd.weight"].shape[0]
    fields |= {field: _settings(tensors[name]) for name, field in SETTINGS.items() if name in tensors}
    names = {**FIELDS, **(family.gguf_names if family else {})}
    fields |= _scaling(own, names) | _head_width(own, names)
    fields |= {names.get(key, key): value for key, value in own.items()}
    if family and family.gguf_fields:
        fields |= family.gguf_fields(own, frozenset(tensors))
    return Fields(fields, f"GGUF metadata of {arch!r}", "gguf")


def _settings(info: TensorInfo) -> list[float]:
    if len(info.shape) != 1 or info.size > MAX_SETTINGS or info.dtype is None:
        found = f"shape {list(info.shape)} of {info.stored}"
        raise CheckpointError(f"tensor {info.name!r} has {found}; allowed: at most {MAX_SETTINGS} floats in a row")
    return read(info).astype(float).tolist()


def _scaling(own: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The rope.scaling.* entries as a rope_scaling object, named by `names` or `SCALING`; taken out of `own`."""
    keys = [key for key in own if key.startswith("rope.scaling.")]
    entries = {key.removeprefix("rope.scaling."): own.pop(key) for key in keys}
    trained = entries.pop("finetuned", None)  # Says how the model was trained, not how it runs, in most families.
    if trained is not None and "rope.scaling.finetuned" in names:
        own["rope.scaling.finetuned"] = trained
    old = own.pop("rope.scale_linear", None)
    if old is not None:
        entries = {"type": "linear", "factor": old, **entries}
    kind = entries.get("type")
    if kind == "none" or not entries:
        return {}
    if kind is None:
        return {f"rope.scaling.{name}": value for name, value in entries.items()}
    keyed = {name: names.get(f"rope.scaling.{name}", SCALING.get(name, name)) for name in entries}
    return {"rope_scaling": {keyed[name]: value for name, value in entries.items()}}


def _head_width(own: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Settle attention.value_length and rope.dimension_count, which only repeat the head width in most files."""
    head_dim, width, heads = (own.get(k) for k in ("attention.key_length", "embedding_length", "attention.head_count"))
    if head_dim is None and isinstance(width, int) and isinstance(heads, int) and heads > 0:
        head_dim = width // heads
    if "attention.value_length" not in names and own.get("attention.value_length") == head_dim:
        own.pop("attention.value_length", None)
    turning = own.get("rope.dimension_count")
    if "rope.dimension_count" in names or turning is None or type(head_dim) is not int or head_dim < 1:
        return {}
    if type(turning) is not int or not 0 < turning <= head_dim:
        raise ConfigError(f"GGUF metadata rope.dimension_count is {turning!r}; allowed: 1 to the head width {head_dim}")
    own.pop("rope.dimension_count")
    return {} if turning == head_dim else {"partial_rotary_factor": turning / head_dim}
