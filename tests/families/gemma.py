"""Gemma 1: norms by 1 + w, embeddings times sqrt(D), tanh GELU under either name."""

from family_cases import Case

BASE = {
    "model_type": "gemma",
    "vocab_size": 64,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}

CASES = (
    Case("base", BASE, norm=0.0),
    Case("biases_untied", BASE | {"attention_bias": True, "tie_word_embeddings": False}, seed=1, norm=0.0),
    Case("multi_head", BASE | {"num_key_value_heads": 8, "head_dim": 6, "hidden_act": "gelu"}, seed=2, norm=0.0),
    Case("linear", BASE | {"rope_parameters": LINEAR, "num_key_value_heads": 1}, seed=3, norm=0.0),
    Case("other_activation", BASE | {"hidden_act": "silu", "rms_norm_eps": 0.1}, seed=4, norm=0.0),
)
