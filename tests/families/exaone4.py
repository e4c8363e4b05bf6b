"""EXAONE 4: layers with windows that turn beside others that do not; all full."""

from collections.abc import Mapping
from typing import Any

from families.llama import LLAMA3
from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "exaone4",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "sliding_window": 5,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NAMED = {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
FULL = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}

CASES = (
    Case("windows", BASE),
    Case("all_full_tied", BASE | FULL | {"sliding_window": None, "tie_word_embeddings": True}, seed=1),
    Case("llama3", BASE | {"rope_parameters": LLAMA3, "sliding_window_pattern": 2}, length=48, seed=2),
    Case("named_layers_slide", BASE | NAMED | {"sliding_window_pattern": "LG", "rms_norm_eps": 0.05}, seed=3),
    Case("none_turns", {**BASE, **FULL, "head_dim": 6, "num_key_value_heads": 8, "hidden_act": "gelu"}, seed=4),
)


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    if config["sliding_window"] is None:
        return {"vocab_size": config["vocab_size"]}
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {
        "vocab_size": config["vocab_size"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": slides,
    }


GGUF = Gguf("exaone4", metadata=metadata, cases=("windows", "all_full_tied", "named_layers_slide"))
