"""Granite 3.x: Llama with constants that multiply embeddings, scores and branches and divide the logits; with experts
too."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, MoESpec, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.families.llama import gguf_fields
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import agreed, read_rope
from jaxlm.conversion.transforms import Fused, PairedRows

QK = ("attn.q", "attn.k", "attn.q_bias", "attn.k_bias")
EXPERTS = ("ffn.experts.gate", "ffn.experts.up")
MOE = "model.layers.{i}.block_sparse_moe."
NAMES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "rope.scaling.finetuned": "rotates",  # These files say so that their layers have no positions at all.
}


def translate(c: Fields, ffn: FFNSpec | MoESpec) -> ModelConfig:
    """What both have in common. A GGUF file without a scale for scores means the usual one."""
    positions, bias = c.count("max_position_embeddings", 2048), c.flag("attention_bias", False)
    rope = read_rope(c, positions)
    attention = AttentionSpec(
        **standard.heads(c),
        rope=rope if c.kind == "hf" or c.flag("rotates", True) else None,
        qkv_bias=bias,
        out_bias=bias,
        scale=c.number("attention_multiplier", 1.0 if c.kind == "hf" else None),
    )
    branch = c.number("residual_multiplier", 1.0)
    layer = LayerSpec(attention, ffn, NormSpec(eps=c.number("rms_norm_eps", 1e-6)), residual_scale=branch)
    divisor = c.number("logits_scaling", 1.0)
    if not divisor:
        raise c.error("logits_scaling", "a number other than 0")
    return standard.model_config(
        c,
        lambda i: layer,
        tie_embeddings=c.flag("tie_word_embeddings", False),
        max_positions=positions,
        embed_scale=c.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / divisor,
    )


def granite(c: Fields) -> ModelConfig:
    act, bias = c.activation("hidden_act", "silu"), c.flag("mlp_bias", False)
    return translate(c, FFNSpec(c.count("intermediate_size"), act, bias=bias))


def granitemoe(c: Fields) -> ModelConfig:
    count = agreed(c, "num_local_experts", [c.count(n, None) for n in ("num_local_experts", "num_experts")], 8)
    expert = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "silu"))
    return translate(c, MoESpec(count, c.count("num_experts_per_tok", 2), expert))


def describe(config: ModelConfig) -> dict[str, Any]:
    layer, attention = config.layers[0], standard.attention_of(config.layers[0])
    divisor = float(np.float32(1.0 / config.logit_scale))  # As files have it, where that is the same.
    fields = standard.describe(config) | {
        "attention_bias": attention.qkv_bias,
        "attention_multiplier": attention.softmax_scale,
        "embedding_multiplier": config.embed_scale,
        "residual_multiplier": layer.residual_scale,
        "logits_scaling": divisor if 1.0 / divisor == config.logit_scale else 1.0 / config.logit_scale,
    }
    if isinstance(layer.ffn, FFNSpec):
        return fields | {"mlp_bias": layer.ffn.bias}
    fields.pop("norm_topk_prob")
    experts = {"num_local_experts": fields.pop("num_experts"), "intermediate_size": fields.pop("moe_intermediate_size")}
    return fields | experts


def gguf_moe(metadata: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in tensors}


FAMILIES = (
    Family(
        model_types=("granite",),
        architectures=("GraniteForCausalLM",),
        translate=granite,
        describe=describe,
        rows=standard.ROWS,
        gguf=("granite",),
        gguf_rows=gguf_rows("granite", {name: PairedRows() for name in QK}),
        gguf_fields=gguf_fields,
        gguf_names=NAMES,
    ),
    Family(
        model_types=("granitemoe",),
        architectures=("GraniteMoeForCausalLM",),
        translate=granitemoe,
        describe=describe,
        rows=(
            *standard.ROWS,
            Row("ffn.router.weight", MOE + "router.layer.weight"),
            Row(EXPERTS, MOE + "input_linear.weight", Fused(axis=1)),
            Row("ffn.experts.down", MOE + "output_linear.weight"),
        ),
        gguf=("granitemoe",),
        gguf_rows=gguf_rows("granitemoe", {name: PairedRows() for name in QK}),
        gguf_fields=gguf_moe,
        gguf_names=NAMES,
        harmless=("router_aux_loss_coef",),
    ),
)
