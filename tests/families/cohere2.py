"""Command R7B: layers with a window turn, the others do not."""

from families.cohere import BASE as PLAIN
from families.cohere import YARN
from family_cases import Case
from foreign_gguf import Gguf

BASE = PLAIN | {"model_type": "cohere2", "num_hidden_layers": 5, "sliding_window": 5}
KINDS = ["full_attention", "sliding_attention", "full_attention"]

CASES = (
    Case("windows", BASE),
    Case("named_layers_slide", BASE | {"num_hidden_layers": 3, "layer_types": KINDS, "attention_bias": True}, seed=1),
    Case("yarn", BASE | {"rope_parameters": YARN, "sliding_window": 8, "layer_norm_eps": 0.05}, length=40, seed=2),
    Case("untied", BASE | {"tie_word_embeddings": False, "num_hidden_layers": 4, "num_key_value_heads": 8}, seed=3),
)
GGUF = Gguf(
    "cohere2",
    metadata=lambda config: {
        "attention.sliding_window": config["sliding_window"],
        "attention.key_length": None,
        "attention.value_length": None,
        "vocab_size": config["vocab_size"],
        "logit_scale": config["logit_scale"],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "rope.scaling.type": "none",
    },
    cases=("windows",),
)
