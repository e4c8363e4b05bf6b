"""GLM-4.5: norms of queries and keys or biases, groups of experts, one or several shared."""

from families.minimax_m2 import renamed
from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "glm4_moe",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "max_position_embeddings": 64,
    "num_mtp_layers": 0,
}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.25,
}

CASES = (
    # A seed without a near tie between experts, which rounding to bfloat16 would decide the other way.
    Case("normalised", BASE, seed=11),
    Case("biases_tied", BASE | {"use_qk_norm": False, "attention_bias": True, "tie_word_embeddings": True}, seed=1),
    Case("groups_raw", BASE | GROUPS | {"norm_topk_prob": False, "n_shared_experts": 2}, seed=2),
    Case("yarn", BASE | {"head_dim": 16, "rope_parameters": YARN, "first_k_dense_replace": 2}, length=40, seed=3),
)
GGUF = Gguf(
    "glm4moe",
    metadata=lambda config: {
        "rope.dimension_count": int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
        "expert_count": config["n_routed_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_gating_func": 2,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "nextn_predict_layers": 0,
    },
    tensors=renamed,
    cases=("normalised", "biases_tied", "yarn"),
)
