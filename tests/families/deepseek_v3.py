"""DeepSeek-V3: groups by their best two, corrections, both pairings of lanes."""

from families.deepseek_v2 import BASE as V2
from families.deepseek_v2 import YARN
from family_cases import Case

BASE = {name: value for name, value in V2.items() if name not in ("topk_method", "n_shared_experts")} | {
    "model_type": "deepseek_v3",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_mtp_layers": 0,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
ONE_GROUP = {"n_group": 1, "topk_group": 1}

CASES = (
    Case("yarn_groups", BASE),
    Case("one_group", BASE | ONE_GROUP | {"norm_topk_prob": False, "rope_interleave": False}, seed=1),
    Case("no_query_latent_biases", BASE | {"q_lora_rank": None, "attention_bias": True, "n_shared_experts": 2}, seed=2),
    Case("plain_tied", BASE | {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default"}}, seed=3),
    Case("interleaved_one_group", BASE | ONE_GROUP | {"norm_topk_prob": False}, seed=5),
    Case("dense_first", BASE | {"first_k_dense_replace": 2, "topk_group": 3, "num_experts_per_tok": 1}, seed=4),
)
