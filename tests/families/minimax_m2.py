"""MiniMax M2: heads turned in part, by both names of that, and wholly."""

from family_cases import Case
from foreign_gguf import Gguf, Tensors

BASE = {
    "model_type": "minimax_m2",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rotary_dim": 6,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
}

CASES = (
    Case("half", BASE),
    Case("one_expert_tied", BASE | {"rotary_dim": 12, "num_experts_per_tok": 1, "tie_word_embeddings": True}, seed=1),
    Case("yarn", BASE | {"rope_parameters": YARN, "rms_norm_eps": 0.05, "num_experts_per_tok": 3}, length=40, seed=2),
    Case("whole", {**BASE, "rotary_dim": None, "num_key_value_heads": 8, "hidden_act": "gelu"}, seed=3),
)


def renamed(tensors: Tensors, config: object) -> Tensors:
    return {name.replace("e_score_correction_bias", "e_score_correction.bias"): a for name, a in tensors.items()}


GGUF = Gguf(
    "minimax-m2",
    metadata=lambda config: {
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_gating_func": 2,
        "rope.dimension_count": config["rotary_dim"],
    },
    tensors=renamed,
    cases=("half", "one_expert_tied", "yarn"),
)
