"""Qwen 3: queries and keys normalised per head, heads of any width, windows as in Qwen 2."""

from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
}
WINDOW = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}

CASES = (
    Case("last_layers_slide", BASE | WINDOW | {"attention_bias": True}),
    Case("plain_tied", BASE | {"tie_word_embeddings": True}, seed=1),
    Case("bias", BASE | {"attention_bias": True, "sliding_window": 5, "max_window_layers": 0}, seed=2),
    Case("named_layers_slide", BASE | WINDOW | {"layer_types": KINDS, "sliding_window": 4}, seed=3),
    Case("yarn", BASE | {"rope_parameters": YARN, "rms_norm_eps": 0.05}, length=40, seed=4),
    Case("default_width", {**BASE, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}, seed=5),
)
GGUF = Gguf("qwen3", cases=("plain_tied", "bias", "yarn"))
