"""Gemma 4 (text): shared keys and values, K = V, wider full layers, vectors per layer, experts beside the MLP."""

from family_cases import Case

BASE = {
    "model_type": "gemma4_text",
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size": 40,
    "hidden_size_per_layer_input": 6,
    "intermediate_size": 28,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "global_head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "final_logit_softcapping": 12.0,
}
NAMES = {"s": "sliding_attention", "f": "full_attention"}


def kinds(letters: str) -> dict:
    return {"layer_types": [NAMES[k] for k in letters], "num_hidden_layers": len(letters)}


SHARED = BASE | kinds("sfsfssf") | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True}
EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12}
KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 4}
ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
PLAIN = {**ROPES, "full_attention": {"rope_type": "default", "rope_theta": 77.0}}

def case(name: str, config: dict, seed: int = 0) -> Case:
    """Scores are not divided by anything here: smaller queries keep float32 well conditioned."""
    return Case(name, config, seed=seed, weights={"q_norm": 0.15})


CASES = (
    case("shared", SHARED, seed=24),
    case("experts", BASE | kinds("ssf") | EXPERTS | KEYS | {"hidden_size_per_layer_input": 0}, seed=20),
    case("default_pattern", BASE | {"num_hidden_layers": 7, "final_logit_softcapping": None}, seed=2),
    case("shared_keys_as_values", SHARED | KEYS | {"attention_bias": True}, seed=24),
    case("ropes_untied", BASE | kinds("sf") | {"rope_parameters": ROPES, "tie_word_embeddings": False}, seed=4),
    case("plain_rope", BASE | kinds("fs") | {"rope_parameters": PLAIN, "hidden_activation": "silu"}, seed=5),
)
