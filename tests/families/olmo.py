"""OLMo 1: norms without weights, clipped queries, keys and values."""

from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "olmo",
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
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}

CASES = (
    Case("clipped", BASE | {"clip_qkv": 0.8}),
    Case("plain_tied", BASE | {"tie_word_embeddings": True}, seed=1),
    Case("biases", BASE | {"attention_bias": True, "clip_qkv": 1.5, "num_key_value_heads": None}, seed=2),
    Case("linear", BASE | {"rope_parameters": LINEAR, "hidden_act": "gelu"}, seed=3),
)
GGUF = Gguf(
    "olmo",
    metadata=lambda config: {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": config["clip_qkv"]},
    paired=True,
    cases=("clipped", "plain_tied"),
)
