"""Mistral: with and without a window."""

from family_cases import Case

BASE = {
    "model_type": "mistral",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "sliding_window": None,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}

CASES = (
    Case("window", BASE | {"sliding_window": 5}, seed=1),
    Case("no_window", BASE),
    Case("tied_linear", BASE | {"tie_word_embeddings": True, "rope_parameters": LINEAR}, seed=2),
    Case("head_dim_absent", {**BASE, "head_dim": None, "sliding_window": 4096}, seed=3),
)
