"""GLM-4 and GLM-4-0414: half of each head turns, neighbouring lanes in pairs, and gate and up are one matrix. 0414 has
norms after attention and FFN too."""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import read_rope, rotary_dims, share
from jaxlm.conversion.transforms import Fused

QKV = ("attn.q", "attn.k", "attn.v")
QKV_BIAS = ("attn.q_bias", "attn.k_bias", "attn.v_bias")
GATE_UP = ("ffn.gate", "ffn.up")
LAYER = "model.layers.{i}."
ROWS = (
    *(row for row in standard.ROWS if row.target not in GATE_UP),
    Row(GATE_UP, LAYER + "mlp.gate_up_proj.weight", Fused()),
)


def translate(c: Fields, post_norm: bool) -> ModelConfig:
    positions = c.count("max_position_embeddings", 131072)
    heads = standard.heads(c, kv_default=2, dim_default=128)
    rope = read_rope(c, positions, dims=rotary_dims(c, heads["head_dim"], 0.5), interleaved=True)
    attention = AttentionSpec(**heads, rope=rope, qkv_bias=c.flag("attention_bias", True))
    ffn = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "silu"))
    norm = NormSpec(eps=c.number("rms_norm_eps", 1.5625e-07))
    layer = LayerSpec(attention, ffn, norm, post_norm=post_norm)
    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    attention = standard.attention_of(config.layers[0])
    assert attention.rope
    return standard.describe(config) | {
        "attention_bias": attention.qkv_bias,
        "partial_rotary_factor": share(attention.rope.dims, attention.head_dim),
    }


def gguf_fields(metadata: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    return {"attention_bias": bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & tensors)}


def fused_rows(arch: str) -> tuple[Row, ...]:
    """Files made from the older published code have q, k and v in one matrix too."""
    return (
        *(row for row in gguf_rows(arch) if row.target != "ffn.up"),
        Row(GATE_UP, "blk.{i}.ffn_up.weight", Fused()),
        Row(QKV, "blk.{i}.attn_qkv.weight", Fused()),
        Row(QKV_BIAS, "blk.{i}.attn_qkv.bias", Fused()),
    )


FAMILIES = (
    Family(
        model_types=("glm",),
        architectures=("GlmForCausalLM",),
        translate=lambda c: translate(c, post_norm=False),
        describe=describe,
        rows=ROWS,
        gguf=("chatglm",),
        gguf_rows=fused_rows("chatglm"),
        gguf_fields=gguf_fields,
    ),
    Family(
        model_types=("glm4",),
        architectures=("Glm4ForCausalLM",),
        translate=lambda c: translate(c, post_norm=True),
        describe=describe,
        rows=(
            *ROWS,
            Row("attn_post_norm.scale", LAYER + "post_self_attn_layernorm.weight"),
            Row("ffn_post_norm.scale", LAYER + "post_mlp_layernorm.weight"),
        ),
        gguf=("glm4",),
        gguf_rows=fused_rows("glm4"),
        gguf_fields=gguf_fields,
    ),
)
