"""Llama 2 and 3.x, SmolLM2, TinyLlama, Yi and whatever else says model_type "llama"."""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import read_rope
from jaxlm.conversion.transforms import PairedRows


def translate(c: Fields) -> ModelConfig:
    positions = c.count("max_position_embeddings", 2048)
    bias = c.flag("attention_bias", False)
    attention = AttentionSpec(**standard.heads(c), rope=read_rope(c, positions), qkv_bias=bias, out_bias=bias)
    ffn = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "silu"), bias=c.flag("mlp_bias", False))
    layer = LayerSpec(attention, ffn, NormSpec(eps=c.number("rms_norm_eps", 1e-6)))
    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    layer = config.layers[0]
    biases = {"attention_bias": standard.attention_of(layer).qkv_bias, "mlp_bias": standard.ffn_of(layer).bias}
    return standard.describe(config) | biases


def gguf_fields(metadata: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}


FAMILY = Family(
    model_types=("llama",),
    architectures=("LlamaForCausalLM",),
    translate=translate,
    describe=describe,
    rows=standard.ROWS,
    gguf=("llama",),
    gguf_rows=gguf_rows("llama", {t: PairedRows() for t in ("attn.q", "attn.k", "attn.q_bias", "attn.k_bias")}),
    gguf_when=lambda fields: not fields.any("num_experts", 0),
    gguf_fields=gguf_fields,
)
