"""Phi: normed queries and keys, groups of heads, all, a half or a quarter of a head turning."""

from typing import Any

from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "phi",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def rope(share: float, **rest: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": share} | rest}


CASES = (
    Case("qk_norm", BASE | {"qk_layernorm": True}),
    Case("plain", BASE | {"num_key_value_heads": None}, seed=1),
    Case("tied_whole", BASE | {"tie_word_embeddings": True} | rope(1.0), seed=2),
    Case("linear", BASE | rope(0.25, rope_type="linear", factor=4.0) | {"layer_norm_eps": 0.1}, seed=3),
    Case("dynamic_gelu", BASE | {"hidden_act": "gelu"} | rope(0.5, rope_type="dynamic", factor=4.0), seed=4),
)
GGUF = Gguf(
    "phi2",
    metadata=lambda config: {
        "rope.dimension_count": int(8 * config["rope_parameters"]["partial_rotary_factor"]),
        "attention.head_count_kv": config["num_key_value_heads"],
    },
    cases=("plain", "tied_whole"),
)
