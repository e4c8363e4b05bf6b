"""OLMo 1: LayerNorm without weights, queries, keys and values clipped where the config says so."""

from typing import Any

import numpy as np

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import read_rope
from jaxlm.conversion.transforms import PairedRows

EPS = 1e-5  # Fixed in the published code.


def translate(c: Fields) -> ModelConfig:
    positions, bias = c.count("max_position_embeddings", 2048), c.flag("attention_bias", False)
    clip = c.number("clip_qkv", 0.0)
    if "clip_qkv" in c and clip <= 0:
        raise c.error("clip_qkv", "a number above 0, null")
    attention = AttentionSpec(
        **standard.heads(c), rope=read_rope(c, positions), qkv_bias=bias, out_bias=bias, clip=clip
    )
    ffn = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "silu"))
    layer = LayerSpec(attention, ffn, NormSpec("layer", EPS, scale=False))
    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    fields, attention = standard.describe(config), standard.attention_of(config.layers[0])
    fields.pop("rms_norm_eps")
    return fields | {"attention_bias": attention.qkv_bias, "clip_qkv": attention.clip or None}


FAMILY = Family(
    model_types=("olmo",),
    architectures=("OlmoForCausalLM",),
    translate=translate,
    describe=describe,
    rows=standard.ROWS,
    gguf=("olmo",),
    gguf_rows=gguf_rows("olmo", {t: PairedRows() for t in ("attn.q", "attn.k")}),
    gguf_names={"attention.clamp_kqv": "clip_qkv"},
    neutral={"layer_norm_eps": (EPS, float(np.float32(EPS)))},
)
