"""Granite: every multiplier away from 1, and those but the scores' at 1."""

from collections.abc import Mapping
from typing import Any

from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "granite",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 1.7,
}
ONES = dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}

CASES = (
    Case("multiplied", BASE),
    Case("biases_tied", BASE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, seed=1),
    Case("ones", BASE | ONES | {"num_key_value_heads": None}, seed=2),
    Case("yarn_wide_heads", BASE | {"rope_parameters": YARN, "head_dim": 12, "hidden_act": "gelu"}, length=40, seed=3),
)


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


GGUF = Gguf("granite", metadata=metadata, paired=True, cases=("multiplied", "biases_tied", "ones"))
