"""SmolLM3: layers that do not rotate, windows on these or on named ones."""

from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "smollm3",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 5e6, "factor": 4.0, "original_max_position_embeddings": 16}

CASES = (
    Case("unrotated_layers_slide", BASE | WINDOW | {"attention_bias": True}),
    Case("plain", BASE, seed=1),
    Case("biases_untied", BASE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}, seed=2),
    Case("named_layers_slide", BASE | WINDOW | {"layer_types": KINDS, "no_rope_layers": [0, 0, 1, 1, 0]}, seed=3),
    Case("interval", BASE | {"no_rope_layer_interval": 2, "sliding_window": 5}, seed=4),
    Case("yarn", BASE | {"rope_parameters": YARN, "rms_norm_eps": 0.05}, length=40, seed=5),
)
GGUF = Gguf(
    "smollm3",
    metadata=lambda config: {"vocab_size": config["vocab_size"], "rope.dimension_count": config["head_dim"]},
    paired=True,
    cases=("plain", "biases_untied", "yarn"),
)
