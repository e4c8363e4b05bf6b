"""OLMo 3: windows on most layers, scaling on the others."""

from collections.abc import Mapping
from typing import Any

from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "olmo3",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 5,
    "sliding_window": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.3,
    "beta_fast": 24.0,
    "beta_slow": 2.0,
}
NESTED = {"full_attention": YARN, "sliding_attention": PLAIN}
TWO_THETAS = {"full_attention": YARN, "sliding_attention": PLAIN | {"rope_theta": 100.0}}
KINDS = ["full_attention", "sliding_attention", "full_attention"]

CASES = (
    Case("yarn_on_full_layers", BASE | {"rope_parameters": NESTED}, length=40),
    Case("plain", BASE | {"sliding_window": 8, "rms_norm_eps": 0.05}, seed=1),
    Case("named_layers_slide", BASE | {"num_hidden_layers": 3, "layer_types": KINDS, "attention_bias": True}, seed=2),
    Case("two_thetas", BASE | {"rope_parameters": TWO_THETAS}, seed=3),
    Case("tied", BASE | {"tie_word_embeddings": True, "num_hidden_layers": 3}, seed=4),
)


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": slides}


GGUF = Gguf("olmo2", metadata=metadata, cases=("yarn_on_full_layers", "plain"))
