"""OPT: biases and norm weights on and off, a head of its own."""

from family_cases import Case

BASE = {
    "model_type": "opt",
    "vocab_size": 64,
    "hidden_size": 64,
    "ffn_dim": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}

CASES = (
    Case("base", BASE),
    Case("untied_gelu", BASE | {"tie_word_embeddings": False, "activation_function": "gelu"}, seed=1),
    Case("no_bias", BASE | {"enable_bias": False, "num_attention_heads": 8}, seed=2),
    Case("plain_norms", BASE | {"layer_norm_elementwise_affine": False, "ffn_dim": 72}, seed=3),
)
