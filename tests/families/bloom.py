"""BLOOM: counts of heads that are and are not a power of two, a head of its own."""

from family_cases import Case
from foreign_gguf import Gguf, ungrouped

BASE = {"model_type": "bloom", "vocab_size": 64, "hidden_size": 48, "n_layer": 2, "n_head": 8}

CASES = (
    Case("base", BASE),
    Case("six_heads_untied", BASE | {"n_head": 6, "tie_word_embeddings": False}, seed=1),
    Case("twelve_heads_eps", BASE | {"n_head": 12, "layer_norm_epsilon": 0.1, "n_layer": 3}, seed=2),
)
GGUF = Gguf(
    "bloom",
    metadata=lambda config: {
        "context_length": 64,
        "feed_forward_length": 4 * config["hidden_size"],
        "attention.head_count_kv": config["n_head"],
    },
    tensors=lambda tensors, config: {
        name.removeprefix("transformer."): a for name, a in ungrouped(tensors, config["n_head"]).items()
    },
)
