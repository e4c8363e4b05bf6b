"""Llama: every switch of its config on and off."""

from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CASES = (
    Case("base", BASE),
    Case("tied", BASE | {"tie_word_embeddings": True}, seed=1),
    Case("llama3", BASE | {"rope_parameters": LLAMA3}, length=48, seed=2),
    Case("llama3_tied", BASE | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, length=48, seed=3),
    Case("attention_bias", BASE | {"attention_bias": True}, seed=4),
    Case("mlp_bias", BASE | {"mlp_bias": True}, seed=5),
    Case("all_biases_tied", BASE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, seed=6),
    Case("head_dim_absent", {**BASE, "head_dim": None}, seed=7),
    Case("wide_heads", BASE | {"head_dim": 16}, seed=8),
    Case("multi_query", BASE | {"num_key_value_heads": 1}, seed=9),
    Case("multi_head", BASE | {"num_key_value_heads": 8}, seed=10),
    Case("theta", BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, seed=11),
    Case("linear", BASE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, seed=12),
    Case("gelu", BASE | {"hidden_act": "gelu", "num_hidden_layers": 3}, seed=13),
    Case("eps", BASE | {"rms_norm_eps": 0.1, "hidden_act": "relu"}, seed=14),
)
GGUF = Gguf(
    "llama",
    metadata=lambda config: {"vocab_size": config["vocab_size"], "rope.dimension_count": config["head_dim"]},
    paired=True,
    cases=("base", "tied", "all_biases_tied", "head_dim_absent", "multi_query", "theta", "linear"),
)
