"""Command R: one norm for both branches, norms per head of queries and keys."""

from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "cohere",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "logit_scale": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}

CASES = (
    Case("qk_norm", BASE | {"use_qk_norm": True}),
    Case("plain", BASE | {"num_key_value_heads": None, "layer_norm_eps": 0.05}, seed=1),
    Case("biases_untied", BASE | {"attention_bias": True, "tie_word_embeddings": False, "head_dim": 12}, seed=2),
    Case("yarn", BASE | {"rope_parameters": YARN, "use_qk_norm": True, "hidden_act": "gelu"}, length=40, seed=3),
)
GGUF = Gguf(
    "command-r",
    metadata=lambda config: {"logit_scale": config["logit_scale"], "rope.scaling.type": "none"},
    cases=("qk_norm", "plain"),
)
