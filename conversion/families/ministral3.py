"""Ministral 3 and Devstral 2: Mistral with YaRN and queries that grow with their position."""

from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.families.mistral4 import describe_growth, growth
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import read_rope
from jaxlm.conversion.transforms import PairedRows


def translate(c: Fields) -> ModelConfig:
    positions = c.count("max_position_embeddings", 262144)
    attention = AttentionSpec(
        **standard.heads(c, kv_default=8, dim_default=128),
        rope=read_rope(c, positions),
        window=c.count("sliding_window", 0, null=0),
        query_scaling=growth(c, positions),
    )
    ffn = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "silu"))
    layer = LayerSpec(attention, ffn, NormSpec(eps=c.number("rms_norm_eps", 1e-5)))
    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    attention = standard.attention_of(config.layers[0])
    fields = describe_growth(standard.describe(config), attention.query_scaling)
    return fields | {"sliding_window": attention.window or None}


TOWERS = ("vision_tower.*", "multi_modal_projector.*")
PROJECTOR = ("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer")
FAMILY = Family(
    model_types=("ministral3",),
    architectures=("Ministral3ForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(*standard.ROWS, Row("lm_head.table", "language_model.lm_head.weight")),
    gguf=("mistral3",),
    gguf_rows=gguf_rows("mistral3", {t: PairedRows() for t in ("attn.q", "attn.k")}),
    gguf_names={"attention.temperature_scale": "llama_4_scaling_beta"},
    harmless=("max_position_embeddings", *PROJECTOR),
    prefixes=("model.", "language_model.model.", "model.language_model."),
    multimodal=("mistral3",),
    ignored=(*TOWERS, *(f"model.{name}" for name in TOWERS)),
)
