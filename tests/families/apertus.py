"""Apertus: weights of the activation away from their usual values, and another activation."""

from families.llama import LLAMA3
from family_cases import Case

BASE = {
    "model_type": "apertus",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}

CASES = (
    Case("llama3", BASE | {"rope_parameters": LLAMA3}, length=48),
    Case("defaults", BASE, seed=1),
    Case("bias_tied", BASE | {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": PLAIN}, seed=2),
    Case("relu2", {**BASE, "hidden_act": "relu2", "num_key_value_heads": None, "rms_norm_eps": 0.05}, seed=3),
)
