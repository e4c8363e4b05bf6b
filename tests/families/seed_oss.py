"""Seed-OSS: every bias on and off."""

from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "seed_oss",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e7, "factor": 2.0}
OFF_AND_ON = {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}

CASES = (
    Case("base", BASE),
    Case("other_biases", BASE | OFF_AND_ON, seed=1),
    Case("no_biases_tied", BASE | {"attention_bias": False, "tie_word_embeddings": True}, seed=2),
    Case("linear", BASE | {"rope_parameters": LINEAR, "rms_norm_eps": 0.05}, seed=3),
    Case("head_dim_null", {**BASE, "head_dim": None, "num_key_value_heads": None, "hidden_act": "gelu"}, seed=4),
)
GGUF = Gguf("seed_oss", cases=("base", "other_biases", "no_biases_tied", "linear"))
