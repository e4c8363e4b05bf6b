"""GPT-2: every way to scale scores, an FFN of another width, a head of its own."""

import re
from collections.abc import Mapping
from typing import Any

from family_cases import Case
from foreign_gguf import Gguf, Tensors

BASE = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 8,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CASES = (
    Case("base", BASE),
    Case(
        "by_layer",
        BASE | {"n_layer": 3, "n_inner": 56, "scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"},
        seed=1,
    ),
    Case("unscaled_untied", BASE | {"scale_attn_weights": False, "tie_word_embeddings": False}, seed=2),
    Case("upcast_eps", BASE | {"reorder_and_upcast_attn": True, "layer_norm_epsilon": 0.1}, seed=3),
    Case("untied", BASE | {"tie_word_embeddings": False, "n_head": 4}, seed=4),
)


def outputs_first(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The matrices of the blocks transposed."""
    return {n: a.T if re.search(r"\.(c_attn|c_fc|c_proj)\.weight$", n) else a for n, a in tensors.items()}


GGUF = Gguf(
    "gpt2",
    metadata=lambda config: {"feed_forward_length": 4 * config["n_embd"]},
    tensors=outputs_first,
    cases=("base", "untied"),
)
