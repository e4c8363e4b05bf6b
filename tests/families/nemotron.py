"""Nemotron: half, whole and a quarter of each head turned, biases on and off."""

from family_cases import Case
from foreign_gguf import Gguf, Tensors

BASE = {
    "model_type": "nemotron",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
}
WHOLE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.25}
BIASES = {"attention_bias": True, "mlp_bias": True}

CASES = (
    Case("half", BASE, norm=0.0),
    Case("whole_tied", BASE | BIASES | {"rope_parameters": WHOLE, "tie_word_embeddings": True}, seed=1, norm=0.0),
    Case("narrow", BASE | {"hidden_size": 64, "head_dim": 8, "norm_eps": 0.05, "mlp_bias": True}, seed=2, norm=0.0),
    Case("quarter_linear", BASE | {"head_dim": 16, "rope_parameters": LINEAR, "hidden_act": "gelu"}, seed=3, norm=0.0),
)


def shifted(tensors: Tensors, config: object) -> Tensors:
    return {name: a + 1 if name.endswith("norm.weight") else a for name, a in tensors.items()}


GGUF = Gguf(
    "nemotron",
    metadata=lambda config: {
        "vocab_size": config["vocab_size"],
        "attention.layer_norm_epsilon": config["norm_eps"],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"] // 2,
        "rope.scaling.type": "none",
    },
    tensors=shifted,
    cases=("narrow",),
    exact=False,
)
