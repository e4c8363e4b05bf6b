"""Mistral 7B, Nemo, Small and their relatives: Llama's names, a sliding window where the config has one."""

from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.rope_settings import read_rope


def translate(c: Fields) -> ModelConfig:
    positions = c.count("max_position_embeddings", 4096 * 32)
    window = c.count("sliding_window", 4096, null=0)
    attention = AttentionSpec(**standard.heads(c, kv_default=8), rope=read_rope(c, positions), window=window)
    ffn = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "silu"))
    layer = LayerSpec(attention, ffn, NormSpec(eps=c.number("rms_norm_eps", 1e-6)))
    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    return standard.describe(config) | {"sliding_window": standard.attention_of(config.layers[0]).window or None}


# GGUF files of these models say that they are llama.
FAMILY = Family(
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    translate=translate,
    describe=describe,
    rows=standard.ROWS,
)
