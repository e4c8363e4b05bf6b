"""Qwen 2: biases on q, k and v; a window on the last layers, on named ones, or on none."""

from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WINDOW = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 3.0}

CASES = (
    Case("last_layers_slide", BASE | WINDOW),
    Case("no_window", BASE | {"sliding_window": 5, "max_window_layers": 0, "tie_word_embeddings": True}, seed=1),
    Case("named_layers_slide", BASE | WINDOW | {"layer_types": KINDS, "sliding_window": 4, "head_dim": 10}, seed=2),
    Case("yarn", BASE | {"rope_parameters": YARN}, length=40, seed=3),
    Case("linear", BASE | {"rope_parameters": LINEAR, "rms_norm_eps": 0.05, "num_key_value_heads": 8}, seed=4),
    Case("all_slide", BASE | WINDOW | {"max_window_layers": 0, "hidden_act": "gelu"}, seed=5),
)
GGUF = Gguf("qwen2", cases=("no_window", "yarn", "linear"))
