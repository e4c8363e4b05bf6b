"""Qwen 2 and 2.5: biases on q, k and v alone. Qwen 3: queries and keys normalised per head before the rotation."""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import read_rope

KINDS = ("full_attention", "sliding_attention")


def windows(c: Fields) -> tuple[int, ...]:
    """Each layer's window, 0 for none: with use_sliding_window those that layer_types names, else the last layers."""
    window = c.count("sliding_window", 4096, null=0)
    count, full = c.count("num_hidden_layers"), c.count("max_window_layers", 28, least=0)
    window = window if c.flag("use_sliding_window", False) else 0
    plain = tuple(KINDS[int(window > 0 and i >= full)] for i in range(count))
    kinds = c.texts("layer_types", KINDS, count, plain)
    if KINDS[1] in kinds and not window:
        raise c.error("layer_types", "full_attention alone unless use_sliding_window is true and sliding_window given")
    return tuple(window if kind == KINDS[1] else 0 for kind in kinds)


def translate(c: Fields, heads: Mapping[str, Any]) -> ModelConfig:
    """What both have in common; `heads` are the fields of AttentionSpec that differ."""
    positions = c.count("max_position_embeddings", 32768)
    rope, sizes = read_rope(c, positions), windows(c)
    ffn = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "silu"))

    def layer(i: int) -> LayerSpec:
        return LayerSpec(AttentionSpec(**heads, rope=rope, window=sizes[i]), ffn, norm(c))

    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, layer, tie_embeddings=tied, max_positions=positions)


def norm(c: Fields) -> NormSpec:
    return NormSpec(eps=c.number("rms_norm_eps", 1e-6))


def qwen2(c: Fields) -> ModelConfig:
    return translate(c, {**standard.heads(c, kv_default=32), "qkv_bias": True})


def qwen3(c: Fields) -> ModelConfig:
    bias = c.flag("attention_bias", False)
    heads = standard.heads(c, kv_default=32, dim_default=128)
    return translate(c, {**heads, "qkv_bias": bias, "out_bias": bias, "qk_norm": norm(c)})


def describe(config: ModelConfig) -> dict[str, Any]:
    attentions = [standard.attention_of(layer) for layer in config.layers]
    window = max(attention.window for attention in attentions)
    return standard.describe(config) | {
        "use_sliding_window": window > 0,
        "sliding_window": window or None,
        "layer_types": [KINDS[int(attention.window > 0)] for attention in attentions],
    }


def describe_bias(config: ModelConfig) -> dict[str, Any]:
    return describe(config) | {"attention_bias": standard.attention_of(config.layers[0]).qkv_bias}


def gguf_bias(metadata: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in tensors}


FAMILIES = (
    Family(
        model_types=("qwen2",),
        architectures=("Qwen2ForCausalLM",),
        translate=qwen2,
        describe=describe,
        rows=standard.ROWS,
        gguf=("qwen2",),
        gguf_rows=gguf_rows("qwen2"),
        # The biases are there whatever the config says of them.
        harmless=("attention_bias",),
        neutral={"use_mrope": False},
    ),
    Family(
        model_types=("qwen3",),
        architectures=("Qwen3ForCausalLM",),
        translate=qwen3,
        describe=describe_bias,
        rows=(*standard.ROWS, *standard.QK_NORMS),
        gguf=("qwen3",),
        gguf_rows=gguf_rows("qwen3"),
        gguf_fields=gguf_bias,
    ),
)
