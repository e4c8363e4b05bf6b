"""GLM-4-0414: norms on both sides."""

from families.glm import BASE as PLAIN
from families.glm import WHOLE, YARN
from family_cases import Case
from foreign_gguf import Gguf

BASE = PLAIN | {"model_type": "glm4"}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.25}

CASES = (
    Case("half", BASE | {"head_dim": 16}),
    Case("whole_tied", BASE | {"rope_parameters": WHOLE, "attention_bias": False, "tie_word_embeddings": True}, seed=1),
    Case("yarn", BASE | {"rope_parameters": YARN, "rms_norm_eps": 0.05}, length=40, seed=2),
    Case("quarter_linear", BASE | {"head_dim": 16, "rope_parameters": LINEAR, "hidden_act": "gelu"}, seed=3),
)
GGUF = Gguf(
    "glm4",
    metadata=lambda config: {
        "rope.dimension_count": int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    },
    cases=("half", "whole_tied", "yarn"),
)
