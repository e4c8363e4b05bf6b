"""Falcon: one norm or two, side by side or not, one key/value head, groups or all; ALiBi within and beyond 256."""

from collections.abc import Mapping
from typing import Any

from family_cases import Case
from foreign_gguf import Gguf, Tensors, ungrouped

BASE = {
    "model_type": "falcon",
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
}
NEW = BASE | {"new_decoder_architecture": True, "num_kv_heads": 2}
RW = BASE | {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}

CASES = (
    Case("new", NEW),
    Case("older", BASE, seed=1),
    Case("new_one_norm", NEW | {"num_ln_in_parallel_attn": 1, "bias": True, "ffn_hidden_size": 56}, seed=2),
    # With ALiBi the published eager attention adds the slopes twice, the default one (sdpa) once, as in training.
    Case("one_after_another", RW, seed=3, attention="sdpa"),
    # Products of slope and position that bfloat16 cannot hold: positions above 256, slopes that are not powers of two.
    Case(
        "alibi_long", RW | {"num_attention_heads": 4, "max_position_embeddings": 512}, length=300, seed=4,
        attention="sdpa",
    ),
    Case("alibi_parallel", BASE | {"alibi": True, "num_attention_heads": 16}, length=48, seed=5, attention="sdpa"),
    Case("multi_head", BASE | {"multi_query": False, "rope_parameters": LINEAR, "tie_word_embeddings": False}, seed=6),
    Case("relu_eps", NEW | {"activation": "relu", "layer_norm_epsilon": 0.1, "num_kv_heads": 4}, seed=7),
)  # fmt: skip


def kv_heads(config: Mapping[str, Any]) -> int:
    return 1 if config["multi_query"] and not config["new_decoder_architecture"] else config["num_kv_heads"]


def regrouped(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    return ungrouped(tensors, kv_heads(config), config["num_attention_heads"] // kv_heads(config))


GGUF = Gguf(
    "falcon",
    metadata=lambda config: {
        "attention.head_count_kv": kv_heads(config),
        "feed_forward_length": config["ffn_hidden_size"],
        "tensor_data_layout": "jploski",
    },
    tensors=regrouped,
    cases=("new", "older", "new_one_norm", "multi_head"),
)
