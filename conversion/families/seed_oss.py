"""Seed-OSS: biases on q, k and v, each other bias a switch of its own."""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import read_rope


def translate(c: Fields) -> ModelConfig:
    positions = c.count("max_position_embeddings", 524288)
    attention = AttentionSpec(
        **standard.heads(c, kv_default=8, dim_default=None if "head_dim" in c.values else 128),
        rope=read_rope(c, positions),
        qkv_bias=c.flag("attention_bias", True),
        out_bias=c.flag("attention_out_bias", False),
    )
    ffn = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "silu"), bias=c.flag("mlp_bias", False))
    layer = LayerSpec(attention, ffn, NormSpec(eps=c.number("rms_norm_eps", 1e-6)))
    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    attention, ffn = standard.attention_of(config.layers[0]), standard.ffn_of(config.layers[0])
    biases = {"attention_bias": attention.qkv_bias, "attention_out_bias": attention.out_bias, "mlp_bias": ffn.bias}
    return standard.describe(config) | biases


def gguf_fields(metadata: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    parts = {"attention_bias": "attn_q", "attention_out_bias": "attn_output", "mlp_bias": "ffn_up"}
    return {name: f"blk.0.{part}.bias" in tensors for name, part in parts.items()}


FAMILY = Family(
    model_types=("seed_oss",),
    architectures=("SeedOssForCausalLM",),
    translate=translate,
    describe=describe,
    rows=standard.ROWS,
    gguf=("seed_oss",),
    # What these files call post_attention_norm is the norm before the FFN.
    gguf_rows=gguf_rows("seed_oss", targets={"blk.{bid}.post_attention_norm": ("ffn_norm.scale", "")}),
    gguf_fields=gguf_fields,
    harmless=("residual_dropout",),
)
