"""GLM-4: heads turned by half, wholly and by a quarter, with and without biases."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from family_cases import Case
from foreign_gguf import Gguf, Tensors

BASE = {
    "model_type": "glm",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
}
NARROW = BASE | {"hidden_size": 64, "head_dim": 8}
WHOLE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
}

CASES = (
    Case("half", BASE),
    Case("narrow", NARROW, seed=1),
    Case("whole_tied", BASE | {"rope_parameters": WHOLE, "attention_bias": False, "tie_word_embeddings": True}, seed=2),
    Case("yarn", BASE | {"rope_parameters": YARN, "rms_norm_eps": 0.05}, length=40, seed=3),
    Case("multi_head", NARROW | {"num_key_value_heads": 8, "hidden_act": "gelu"}, seed=4),
)


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The head width is not written, and the context length is the model's width."""
    return {
        "context_length": config["hidden_size"],
        "attention.key_length": None,
        "attention.value_length": None,
        "rope.dimension_count": config["head_dim"] // 2,
        "rope.freq_base": 10000.0,
    }


def fused(tensors: Tensors, config: object) -> Tensors:
    """q, k and v in one, as in files made from the older published code."""
    result: Tensors = {}
    for name in sorted(tensors, key=lambda name: "qkv".find(name.split("self_attn.")[-1][0])):
        part, array = re.sub(r"\.[qkv]_proj\.", ".qkv.", name), tensors[name]
        result[part] = np.concatenate([result[part], array]) if part in result else array
    return result


GGUF = Gguf(
    "chatglm",
    metadata=metadata,
    tensors=fused,
    names={"model.layers.{i}.self_attn.qkv": "blk.{i}.attn_qkv"},
    cases=("narrow",),
)
