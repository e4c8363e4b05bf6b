"""Hunyuan dense: theta stretched by alpha, and the scaling that grows with the context."""

from collections.abc import Mapping
from typing import Any

from family_cases import Case
from foreign_gguf import Gguf

BASE = {
    "model_type": "hunyuan_v1_dense",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 1.0}
ALPHA = DYNAMIC | {"alpha": 50.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}

CASES = (
    Case("alpha", BASE | {"rope_parameters": ALPHA}),
    Case("plain_bias_tied", BASE | {"attention_bias": True, "tie_word_embeddings": True}, seed=1),
    Case("multi_head", {**BASE, "num_key_value_heads": None, "rope_parameters": ALPHA | {"alpha": 1e3}}, seed=2),
    Case("dynamic", BASE | {"rope_parameters": DYNAMIC | {"factor": 2.0}, "rms_norm_eps": 0.05}, seed=3),
    Case("wide_heads", BASE | {"head_dim": 16, "hidden_act": "gelu"}, seed=4),
)


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The stretched theta is written, and a context length in which there is no reason."""
    rope, width = config["rope_parameters"], config["head_dim"]
    if rope["rope_type"] != "dynamic":
        return {}
    return {
        "context_length": 262144,
        "rope.freq_base": rope["rope_theta"] * rope["alpha"] ** (width / (width - 2)),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 262144,
    }


GGUF = Gguf("hunyuan-dense", metadata=metadata, cases=("alpha", "plain_bias_tied", "multi_head"))
