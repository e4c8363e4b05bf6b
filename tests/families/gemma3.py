"""Gemma 3 (text): normalised queries and keys, a theta of their own for sliding layers, scaling on full layers only."""

from family_cases import Case

BASE = {
    "model_type": "gemma3_text",
    "vocab_size": 64,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "query_pre_attn_scalar": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
LOCAL = {"rope_type": "default", "rope_theta": 50.0}
BOTH = {"full_attention": LINEAR, "sliding_attention": LOCAL}
SEVEN = {**{k: v for k, v in BASE.items() if k != "layer_types"}, "num_hidden_layers": 7}

CASES = (
    Case("base", BASE | {"rope_parameters": BOTH}, norm=0.0),
    Case("plain_thetas", BASE, seed=1, norm=0.0),
    Case("default_pattern", SEVEN | {"sliding_window": 4}, seed=2, norm=0.0),
    Case("final_cap", BASE | {"final_logit_softcapping": 12.0, "rms_norm_eps": 0.01}, seed=3, norm=0.0),
    Case("biases_untied", BASE | {"attention_bias": True, "tie_word_embeddings": False}, seed=4, norm=0.0),
    Case("scaled_sliding", BASE | {"rope_parameters": {"full_attention": LOCAL, "sliding_attention": LINEAR}}, seed=5,
         norm=0.0),
)
