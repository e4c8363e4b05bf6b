"""Gemma 3 (text): Gemma 2 with normalised queries and keys, and with rotary settings of its own for sliding layers."""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec, RopeSpec
from jaxlm.conversion import standard
from jaxlm.conversion.families.gemma import CAUSAL, OFFSET_NORMS, cap, describe_sliding, gguf_scale
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import describe_scaling, read_local_rope, read_rope


def translate(c: Fields) -> ModelConfig:
    positions, bias = c.count("max_position_embeddings", 131072), c.flag("attention_bias", False)
    width, norm = c.count("hidden_size", 2304), NormSpec(eps=c.number("rms_norm_eps", 1e-6), unit_offset=True)
    heads = {
        "num_heads": c.count("num_attention_heads", 8),
        "num_kv_heads": c.count("num_key_value_heads", 4),
        "head_dim": c.count("head_dim", 256),
    }
    windows = standard.windows(c, c.count("sliding_window_pattern", 6), default=4096)
    ropes = (
        read_rope(c, positions, 1e6, "full_attention"),
        read_local_rope(c, positions, 1e4, "sliding_attention", "rope_local_base_freq"),
    )
    scale = c.count("query_pre_attn_scalar", 256) ** -0.5
    ffn = FFNSpec(c.count("intermediate_size", 9216), c.activation("hidden_activation", "gelu_pytorch_tanh"))

    def layer(window: int) -> LayerSpec:
        attention = AttentionSpec(
            **heads, rope=ropes[window > 0], qkv_bias=bias, out_bias=bias, window=window, scale=scale, qk_norm=norm
        )
        return LayerSpec(attention, ffn, norm, post_norm=True)

    return ModelConfig(
        vocab_size=c.count("vocab_size", 262208),
        hidden_size=width,
        layers=tuple(map(layer, windows)),
        final_norm=norm,
        tie_embeddings=c.flag("tie_word_embeddings", True),
        max_positions=positions,
        embed_scale=width**0.5,
        logit_softcap=cap(c, "final_logit_softcapping", 0.0),
    )


def describe(config: ModelConfig) -> dict[str, Any]:
    """Both spellings of the rotary settings: the older has no scaling for sliding layers, nor has any model."""
    ropes = {bool(a.window): a.rope for a in map(standard.attention_of, config.layers)}
    full, local = ropes.get(False) or RopeSpec(1e6), ropes.get(True) or RopeSpec(1e4)
    scaling = {"rope_scaling": describe_scaling(full.scaling, config.max_positions)} if full.scaling else {}
    both = {"full_attention": full, "sliding_attention": local}
    return describe_sliding(config) | scaling | {
        "rope_theta": full.theta,
        "rope_local_base_freq": local.theta,
        "rope_parameters": {
            kind: {"rope_theta": rope.theta, **describe_scaling(rope.scaling, config.max_positions)}
            for kind, rope in both.items()
        },
    }


def gguf_fields(metadata: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """A file without a window has no layers that slide; a pattern is a period, or says of each layer if it slides."""
    fields, pattern = gguf_scale(metadata, widest=62), metadata.get("attention.sliding_window_pattern")
    if not metadata.get("attention.sliding_window"):
        fields |= {"sliding_window_pattern": 1, "sliding_window": None}
    elif isinstance(pattern, list):
        kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        fields |= {"layer_types": kinds, "sliding_window_pattern": None}
    return fields


TOWERS = ("vision_tower.*", "multi_modal_projector.*")
FAMILY = Family(
    model_types=("gemma3_text",),
    architectures=("Gemma3ForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(*standard.FOUR_NORMS, *standard.QK_NORMS, Row("lm_head.table", "language_model.lm_head.weight")),
    gguf=("gemma3",),
    gguf_rows=gguf_rows("gemma3", OFFSET_NORMS),
    gguf_fields=gguf_fields,
    gguf_names={
        "attention.sliding_window_pattern": "sliding_window_pattern",
        "rope.freq_base_swa": "rope_local_base_freq",
    },
    harmless=("_sliding_window_pattern", "cache_implementation"),
    neutral=CAUSAL,
    prefixes=("model.", "language_model.model.", "model.language_model."),
    multimodal=("gemma3",),
    ignored=(*TOWERS, *(f"model.{name}" for name in TOWERS)),
)
