"""Mistral 4: queries that have grown several times by the end of the prompt, with and without groups."""

from families.deepseek_v2 import BASE as V2
from families.deepseek_v2 import YARN
from family_cases import Case

TURNING = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7}
SHORT = TURNING | {"original_max_position_embeddings": 4}
BASE = {name: value for name, value in V2.items() if name not in ("topk_method", "n_shared_experts")} | {
    "model_type": "mistral4",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
    "num_hidden_layers": 2,
    "rope_parameters": SHORT,
    "rope_interleave": True,
}
ONE_GROUP = {"n_group": 1, "topk_group": 1}

CASES = (
    Case("grown", BASE),
    Case("one_group", BASE | ONE_GROUP | {"norm_topk_prob": False, "rope_interleave": False}, seed=1),
    Case("dense_biases", BASE | {"first_k_dense_replace": 1, "attention_bias": True, "q_lora_rank": None}, seed=2),
    Case("once_tied", BASE | {"tie_word_embeddings": True, "rope_parameters": TURNING}, seed=3),
)
