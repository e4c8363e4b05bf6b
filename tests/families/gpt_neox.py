"""GPT-NeoX: both residual forms, biases on and off, all, a half or a quarter of a head turning."""

from typing import Any

from family_cases import Case
from foreign_gguf import Gguf, ungrouped

BASE = {
    "model_type": "gpt_neox",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def rope(share: float = 0.25, **rest: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": share} | rest}


CASES = (
    Case("base", BASE),
    Case("one_after_another", BASE | {"use_parallel_residual": False} | rope(0.5), seed=1),
    Case("no_bias_tied", BASE | {"attention_bias": False, "tie_word_embeddings": True} | rope(1.0), seed=2),
    Case(
        "linear",
        BASE | {"hidden_act": "gelu_new", "layer_norm_eps": 0.1} | rope(0.75, rope_type="linear", factor=2.0),
        seed=3,
    ),
)
GGUF = Gguf(
    "gptneox",
    metadata=lambda config: {
        "rope.dimension_count": int(16 * config["rope_parameters"]["partial_rotary_factor"]),
        "use_parallel_residual": config["use_parallel_residual"],
    },
    tensors=lambda tensors, config: ungrouped(tensors, config["num_attention_heads"]),
    cases=("base", "one_after_another", "no_bias_tied"),
)
