"""GPT-J: a part of a head or all of it turning, an FFN of another width, a tied head."""

from family_cases import Case

BASE = {
    "model_type": "gptj",
    "vocab_size": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "rotary_dim": 6,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CASES = (
    Case("base", BASE),
    Case("whole", BASE | {"rotary_dim": 16, "n_inner": 56, "activation_function": "relu"}, seed=1),
    Case("tied", BASE | {"tie_word_embeddings": True, "n_head": 8, "rotary_dim": 4, "layer_norm_epsilon": 0.1}, seed=2),
)
