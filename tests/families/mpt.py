"""MPT: every setting of attention, counts of heads that are and are not a power of two."""

from typing import Any

from family_cases import Case
from foreign_gguf import Gguf

BASE = {"model_type": "mpt", "vocab_size": 64, "d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 32}


def attention(**settings: Any) -> dict[str, Any]:
    return BASE | {"attn_config": settings}


CASES = (
    Case("clipped", attention(clip_qkv=0.8)),
    Case("base", BASE | {"n_heads": 8}, seed=1),
    Case("scaled", attention(softmax_scale=0.5, clip_qkv=None) | {"layer_norm_epsilon": 0.1}, seed=2),
    Case("untied", BASE | {"tie_word_embeddings": False, "n_heads": 12}, seed=3),
)
GGUF = Gguf(
    "mpt",
    metadata=lambda config: {
        "context_length": config["max_seq_len"],
        "embedding_length": config["d_model"],
        "block_count": config["n_layers"],
        "feed_forward_length": 4 * config["d_model"],
        "attention.head_count": config["n_heads"],
        "attention.clamp_kqv": config["attn_config"]["clip_qkv"],
        "attention.max_alibi_bias": float(config["attn_config"]["alibi_bias_max"]),
    },
    cases=("clipped", "base", "untied"),
)
