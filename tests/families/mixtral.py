"""Mixtral: experts in every layer, with and without a window."""

from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}

# Seeds with no near tie between experts, which rounding to bfloat16 could turn.
CASES = (
    Case("window", BASE | {"sliding_window": 5}, seed=1),
    Case("plain", BASE, seed=5),
    Case("tied_linear", BASE | {"tie_word_embeddings": True, "rope_parameters": LINEAR}, seed=2),
    Case("head_dim_absent", {**BASE, "head_dim": None, "num_experts_per_tok": 3, "hidden_act": "gelu"}, seed=3),
    Case("defaults", {**BASE, "num_local_experts": 8, "num_key_value_heads": 8, "rms_norm_eps": 0.05}, seed=4),
)
GGUF = Gguf(
    "llama",
    metadata=lambda config: {"vocab_size": config["vocab_size"], "rope.dimension_count": config["head_dim"]},
    names={
        "model.layers.{i}.block_sparse_moe.gate": "blk.{i}.ffn_gate_inp",
        "model.layers.{i}.block_sparse_moe.experts.w1": "blk.{i}.ffn_gate_exps",
        "model.layers.{i}.block_sparse_moe.experts.w2": "blk.{i}.ffn_down_exps",
        "model.layers.{i}.block_sparse_moe.experts.w3": "blk.{i}.ffn_up_exps",
    },
    paired=True,
    cases=("plain", "tied_linear", "defaults"),
)
