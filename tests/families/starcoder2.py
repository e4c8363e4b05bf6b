"""StarCoder2: windows, biases on and off, a head of its own."""

from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "starcoder2",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}

CASES = (
    Case("window", BASE | {"sliding_window": 5}),
    Case("plain", BASE, seed=1),
    Case("no_bias_untied", BASE | {"use_bias": False, "tie_word_embeddings": False}, seed=2),
    Case("linear", BASE | {"rope_parameters": LINEAR, "num_key_value_heads": 8, "norm_epsilon": 0.1}, seed=3),
    Case("exact_gelu_window", BASE | {"hidden_act": "gelu", "sliding_window": 7}, seed=4),
)
GGUF = Gguf(
    "starcoder2",
    metadata=lambda config: {"attention.layer_norm_epsilon": config["norm_epsilon"]},
    cases=("plain", "no_bias_untied", "linear"),
)
