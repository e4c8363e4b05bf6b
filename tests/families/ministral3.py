"""Ministral 3: queries that have grown several times by the end of the prompt, windows, YaRN."""

from families.deepseek_v2 import YARN
from family_cases import Case

TURNING = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7, "max_position_embeddings": 128}
SHORT = TURNING | {"original_max_position_embeddings": 4}
BASE = {
    "model_type": "ministral3",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "rope_parameters": SHORT,
}

CASES = (
    Case("grown_window", BASE | {"sliding_window": 5}),
    Case("grown", BASE, seed=1),
    Case("sharper_tied", BASE | {"rope_parameters": TURNING | {"mscale": 2.0}, "tie_word_embeddings": True}, seed=2),
    Case("no_growth", BASE | {"rope_parameters": SHORT | {"llama_4_scaling_beta": 0}}, seed=3),
)
