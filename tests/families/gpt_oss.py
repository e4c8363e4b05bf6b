"""gpt-oss: windows on every other layer, wrapped several times; the clamp reached by most lanes."""

from family_cases import Case

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
BASE = {
    "model_type": "gpt_oss",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "swiglu_limit": 0.7,
    "max_position_embeddings": 128,
    "rope_parameters": YARN,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FULL = ["full_attention", "sliding_attention", "full_attention", "full_attention"]

CASES = (
    Case("windows", BASE),
    Case("layer_types", BASE | {"layer_types": FULL, "rope_parameters": YARN | {"truncate": True}}, seed=1),
    Case("no_bias_tied", BASE | {"attention_bias": False, "tie_word_embeddings": True, "swiglu_limit": 7.0}, seed=2),
    Case(
        "plain_turns",
        BASE
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}, "num_experts_per_tok": 1}
        | {"num_key_value_heads": 8, "num_hidden_layers": 2},
        seed=3,
    ),
    Case("published", BASE | {"swiglu_limit": 7.0}, seed=4),
)
