"""DeepSeek-V2: with and without a query latent, groups, biases, YaRN with its sharper scores."""

from family_cases import Case

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 16,
}
BASE = {
    "model_type": "deepseek_v2",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 128,
    "rope_parameters": YARN,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GREEDY = {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
BIASES = {"attention_bias": True, "mlp_bias": True}
PLAIN = {"rope_type": "default"}

CASES = (
    Case("yarn_groups", BASE),
    Case("lite", BASE | GREEDY, seed=1),
    Case("biases", BASE | BIASES | {"rope_parameters": YARN | {"mscale": 1.0}}, seed=2),
    Case("plain_tied", BASE | GREEDY | {"tie_word_embeddings": True, "rope_parameters": PLAIN}, seed=3),
    Case("dense_first", BASE | {"first_k_dense_replace": 2, "v_head_dim": 10, "topk_group": 3}, seed=4),
)
