"""Gemma 2: norms before and after, sliding and full layers in turn, soft caps on scores and logits."""

from family_cases import Case

BASE = {
    "model_type": "gemma2",
    "vocab_size": 64,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "query_pre_attn_scalar": 7,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 12.0,
}
KINDS = ["full_attention", "sliding_attention", "sliding_attention"]
PLAIN = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}

CASES = (
    Case("base", BASE, norm=0.0),
    Case("no_caps", BASE | PLAIN, seed=1, norm=0.0),
    Case("biases_untied", BASE | {"attention_bias": True, "tie_word_embeddings": False}, seed=2, norm=0.0),
    Case("layer_types", BASE | {"layer_types": KINDS, "num_hidden_layers": 3, "sliding_window": 8}, seed=3, norm=0.0),
    Case("linear", BASE | {"rope_parameters": LINEAR, "hidden_activation": "gelu"}, seed=4, norm=0.0),
)
