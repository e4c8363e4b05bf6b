"""Qwen 3 with experts: weights that sum to one or not, dense layers by number and by step, a window on all layers."""

from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}

# Seeds with no near tie between experts, which rounding to bfloat16 could turn.
CASES = (
    Case("window", BASE | WINDOW | {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    Case("plain", BASE, seed=1),
    Case("not_normalised", BASE | {"norm_topk_prob": False, "attention_bias": True, "sliding_window": 5}, seed=2),
    Case("every_other_layer", BASE | {"num_hidden_layers": 4, "decoder_sparse_step": 2}, seed=6),
    Case("one_expert_tied", BASE | {"num_experts_per_tok": 1, "tie_word_embeddings": True}, seed=4),
    Case("bias_yarn", BASE | {"attention_bias": True, "rope_parameters": YARN}, length=40, seed=5),
)
GGUF = Gguf(
    "qwen3moe",
    metadata=lambda config: {"expert_feed_forward_length": config["moe_intermediate_size"]},
    cases=("plain", "one_expert_tied", "bias_yarn"),
)
