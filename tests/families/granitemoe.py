"""Granite with experts, which are kept in one matrix for gate and up."""

from families.granite import BASE as DENSE
from families.granite import ONES, YARN, metadata
from family_cases import Case
from foreign_gguf import Gguf, Tensors

BASE = DENSE | {
    "model_type": "granitemoe",
    "intermediate_size": 20,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}

CASES = (
    Case("multiplied", BASE),
    Case("bias_tied", BASE | {"attention_bias": True, "tie_word_embeddings": True, "num_experts_per_tok": 1}, seed=1),
    Case("ones_defaults", BASE | ONES | {"num_local_experts": 8, "num_key_value_heads": None}, seed=2),
    Case("yarn", BASE | {"rope_parameters": YARN, "rms_norm_eps": 0.05, "hidden_act": "gelu"}, length=40, seed=3),
)


def apart(tensors: Tensors, config: object) -> Tensors:
    """Gate and up of all experts as two tensors."""
    parts: Tensors = {}
    for name, array in tensors.items():
        stem = name.removesuffix("input_linear.weight")
        if stem == name:
            parts[name] = array
        else:
            half = array.shape[1] // 2
            parts |= {f"{stem}gate.weight": array[:, :half], f"{stem}up.weight": array[:, half:]}
    return parts


AT = "model.layers.{i}.block_sparse_moe."
GGUF = Gguf(
    "granitemoe",
    metadata=lambda config: metadata(config),
    tensors=apart,
    names={AT + "gate": "blk.{i}.ffn_gate_exps", AT + "up": "blk.{i}.ffn_up_exps"},
    paired=True,
    cases=("multiplied", "bias_tied", "ones_defaults"),
)
