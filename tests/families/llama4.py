"""Llama 4: chunks shorter than the prompt, layers without positions whose queries grow, both kinds of FFN."""

from family_cases import Case

SCOUT = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
}
BASE = {
    "model_type": "llama4_text",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 20,
    "intermediate_size_mlp": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 5,
    "floor_scale": 4,
    "attn_scale": 0.7,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FULL = ["full_attention", "chunked_attention"]
ALL_SPARSE = {"moe_layers": [0, 1, 2, 3]}
# What GGUF files leave unsaid is so.
PUBLISHED = {
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "rope_parameters": SCOUT | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192},
}

CASES = (
    Case("chunks", BASE),
    Case("scout_tied", BASE | ALL_SPARSE | {"rope_parameters": SCOUT, "tie_word_embeddings": True}, seed=1),
    Case("no_norms", BASE | {"use_qk_norm": False, "attn_temperature_tuning": False, "num_experts_per_tok": 2}, seed=2),
    Case("no_chunks", BASE | {"attention_chunk_size": None, "attention_bias": True, "moe_layers": [0]}, seed=3),
    Case("lists", BASE | {"no_rope_layers": [0, 1, 1, 0], "layer_types": FULL * 2, "num_key_value_heads": 8}, seed=4),
    Case("published", BASE | PUBLISHED, seed=5),
)
