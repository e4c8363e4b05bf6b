"""OLMo 2: norms after, queries and keys normalised over all heads."""

from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "olmo2",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16}

CASES = (
    Case("base", BASE),
    Case("biases_tied", BASE | {"attention_bias": True, "tie_word_embeddings": True}, seed=1),
    Case("yarn", BASE | {"rope_parameters": YARN, "rms_norm_eps": 0.05}, length=40, seed=2),
    Case("heads_absent", {**BASE, "num_key_value_heads": None, "head_dim": 6, "hidden_act": "gelu"}, seed=3),
)
GGUF = Gguf("olmo2", cases=("base", "yarn"))
