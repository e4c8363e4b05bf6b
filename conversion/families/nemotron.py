"""Nemotron 3 and 4, Minitron: LayerNorm times 1 + w, an FFN without a gate, partly turned heads."""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import read_rope, rotary_dims, share
from jaxlm.conversion.transforms import Added

NORMS = ("attn_norm.scale", "ffn_norm.scale", "final_norm.scale")
LAYER = "model.layers.{i}."


def translate(c: Fields) -> ModelConfig:
    positions, bias = c.count("max_position_embeddings", 4096), c.flag("attention_bias", False)
    heads = standard.heads(c)
    rope = read_rope(c, positions, dims=rotary_dims(c, heads["head_dim"], 0.5))
    attention = AttentionSpec(**heads, rope=rope, qkv_bias=bias, out_bias=bias)
    act, inner = c.activation("hidden_act", "relu2"), c.count("intermediate_size")
    ffn = FFNSpec(inner, act, gated=False, bias=c.flag("mlp_bias", False))
    norm = NormSpec("layer", c.number("norm_eps", 1e-5), bias=True, unit_offset=True)
    tied, layer = c.flag("tie_word_embeddings", False), LayerSpec(attention, ffn, norm)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    fields, attention = standard.describe(config), standard.attention_of(config.layers[0])
    assert attention.rope
    return fields | {
        "norm_eps": fields.pop("rms_norm_eps"),
        "attention_bias": attention.qkv_bias,
        "mlp_bias": standard.ffn_of(config.layers[0]).bias,
        "partial_rotary_factor": share(attention.rope.dims, attention.head_dim),
    }


def gguf_fields(metadata: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}


FAMILY = Family(
    model_types=("nemotron",),
    architectures=("NemotronForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        *standard.ROWS,
        Row("final_norm.bias", "model.norm.bias"),
        Row("attn_norm.bias", LAYER + "input_layernorm.bias"),
        Row("ffn_norm.bias", LAYER + "post_attention_layernorm.bias"),
    ),
    gguf=("nemotron",),
    gguf_rows=gguf_rows("nemotron", {name: Added(-1.0) for name in NORMS}),
    gguf_fields=gguf_fields,
    gguf_names={"attention.layer_norm_epsilon": "norm_eps"},
)
