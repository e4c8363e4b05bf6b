"""StableLM: both residual forms, normed heads, biases on and off."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from family_cases import Case
from foreign_gguf import Gguf, Tensors

BASE = {
    "model_type": "stablelm",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
HALF = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}

CASES = (
    Case("normed_parallel", BASE | {"qk_layernorm": True, "use_parallel_residual": True}),
    Case("plain", BASE, seed=1),
    Case("normed_biased", BASE | {"qk_layernorm": True, "use_qkv_bias": True, "layer_norm_eps": 0.1}, seed=2),
    Case(
        "half_tied",
        BASE | {"rope_parameters": HALF, "tie_word_embeddings": True, "use_qkv_bias": True, "hidden_act": "gelu"},
        seed=3,
    ),
)


def stacked_norms(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The norms of a layer's heads as one tensor."""
    rest = {name: a for name, a in tensors.items() if ".norms." not in name}
    for name in tensors:
        if ".norms.0." in name:
            count = len([n for n in tensors if re.sub(r"norms\.\d+", "norms.0", n) == name])
            parts = [tensors[name.replace(".norms.0.", f".norms.{i}.")] for i in range(count)]
            rest[name.replace(".norms.0.", ".")] = np.stack(parts)
    return rest


GGUF = Gguf(
    "stablelm",
    metadata=lambda config: {
        "rope.dimension_count": int(16 * config["rope_parameters"]["partial_rotary_factor"]),
        "use_parallel_residual": config["use_parallel_residual"],
    },
    tensors=stacked_norms,
    cases=("normed_parallel", "plain", "normed_biased"),
)
