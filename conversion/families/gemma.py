"""Gemma 1 and 2: norms that scale by 1 + w, embeddings times sqrt(D); Gemma 2 adds norms after, windows and caps."""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import read_rope
from jaxlm.conversion.transforms import Added

# A GGUF file stores the factor 1 + w itself.
OFFSET_NORMS = {
    f"{name}.scale": Added(-1.0)
    for name in (
        "final_norm", "attn_norm", "attn_post_norm", "ffn_norm", "ffn_post_norm", "attn.q_norm", "attn.k_norm",
    )
}  # fmt: skip


def tanh_gelu(c: Fields, *names: str) -> Any:
    """The activation under these names, where "gelu" is an old name for the tanh form."""
    given = (c.activation(name) for name in names if name in c)
    found = {"gelu_tanh" if name == "gelu" else name for name in given}
    if len(found) > 1:
        raise c.error(names[0], f"what {names[1]!r} says")
    return found.pop() if found else "gelu_tanh"


def cap(c: Fields, name: str, default: float) -> float:
    """A soft cap; null is none."""
    value = c.number(name, default, null=0.0)
    if name in c and value <= 0:
        raise c.error(name, "a number above 0, null")
    return value


def gemma(c: Fields) -> ModelConfig:
    positions, bias = c.count("max_position_embeddings", 8192), c.flag("attention_bias", False)
    heads = {**standard.heads(c, kv_default=16), "head_dim": c.count("head_dim", 256)}
    attention = AttentionSpec(**heads, rope=read_rope(c, positions), qkv_bias=bias, out_bias=bias)
    ffn = FFNSpec(c.count("intermediate_size"), tanh_gelu(c, "hidden_act", "hidden_activation"))
    layer = LayerSpec(attention, ffn, NormSpec(eps=c.number("rms_norm_eps", 1e-6), unit_offset=True))
    return standard.model_config(
        c, lambda i: layer, tie_embeddings=c.flag("tie_word_embeddings", True), max_positions=positions,
        embed_scale=c.count("hidden_size") ** 0.5,
    )  # fmt: skip


def gemma2(c: Fields) -> ModelConfig:
    positions, bias = c.count("max_position_embeddings", 8192), c.flag("attention_bias", False)
    heads = {**standard.heads(c, kv_default=4), "head_dim": c.count("head_dim", 256)}
    windows = standard.windows(c, c.count("sliding_window_pattern", 2), default=4096)
    norm, rope = NormSpec(eps=c.number("rms_norm_eps", 1e-6), unit_offset=True), read_rope(c, positions)
    scale, softcap = c.count("query_pre_attn_scalar", 256) ** -0.5, cap(c, "attn_logit_softcapping", 50.0)
    ffn = FFNSpec(c.count("intermediate_size"), c.activation("hidden_activation", "gelu_pytorch_tanh"))

    def layer(i: int) -> LayerSpec:
        attention = AttentionSpec(
            **heads, rope=rope, qkv_bias=bias, out_bias=bias, window=windows[i], scale=scale, softcap=softcap
        )
        return LayerSpec(attention, ffn, norm, post_norm=True)

    return standard.model_config(
        c, layer, tie_embeddings=c.flag("tie_word_embeddings", True), max_positions=positions,
        embed_scale=c.count("hidden_size") ** 0.5, logit_softcap=cap(c, "final_logit_softcapping", 30.0),
    )  # fmt: skip


def describe(config: ModelConfig) -> dict[str, Any]:
    bias = standard.attention_of(config.layers[0]).qkv_bias
    return standard.describe(config) | {"attention_bias": bias}


def describe_sliding(config: ModelConfig) -> dict[str, Any]:
    """The fields of Gemma 2, most of which Gemma 3 has too."""
    attentions, fields = [standard.attention_of(layer) for layer in config.layers], describe(config)
    windows = [attention.window for attention in attentions]
    return fields | {
        "hidden_activation": fields.pop("hidden_act"),
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
        "sliding_window": max(windows) or 4096,
        "query_pre_attn_scalar": round(attentions[0].softmax_scale**-2),
        "attn_logit_softcapping": attentions[0].softcap or None,
        "final_logit_softcapping": config.logit_softcap or None,
    }


def gguf_scale(metadata: Mapping[str, Any], widest: int) -> dict[str, Any]:
    """What scores are divided by the root of, which a file does not say: only the model with most layers differs."""
    heads, width = metadata.get("attention.head_count"), metadata.get("embedding_length")
    head_dim = metadata.get("attention.key_length", 256)
    special = metadata.get("block_count") == widest and isinstance(heads, int) and heads > 0
    return {"query_pre_attn_scalar": width // heads if special and isinstance(width, int) else head_dim}


CAUSAL = {"use_bidirectional_attention": False}
FAMILIES = (
    Family(
        model_types=("gemma",),
        architectures=("GemmaForCausalLM",),
        translate=gemma,
        describe=describe,
        rows=standard.ROWS,
        gguf=("gemma",),
        gguf_rows=gguf_rows("gemma", OFFSET_NORMS),
        neutral=CAUSAL,
    ),
    Family(
        model_types=("gemma2",),
        architectures=("Gemma2ForCausalLM",),
        translate=gemma2,
        describe=describe_sliding,
        rows=standard.FOUR_NORMS,
        gguf=("gemma2",),
        gguf_rows=gguf_rows("gemma2", OFFSET_NORMS),
        gguf_fields=lambda metadata, tensors: gguf_scale(metadata, widest=46),
        gguf_names={"attention.sliding_window_pattern": "sliding_window_pattern"},
        harmless=("cache_implementation",),
        neutral=CAUSAL,
    ),
)
