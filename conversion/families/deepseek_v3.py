"""DeepSeek-V3, V3.1, R1 and Kimi K2: latent attention, experts by sigmoid and a correction, from the best groups."""

from typing import Any

from jaxlm.config import LatentAttentionSpec, ModelConfig, RouterSpec
from jaxlm.conversion import latent, latent_gguf
from jaxlm.conversion.family import Family
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.rope_settings import read_rope


def router(c: Fields) -> RouterSpec:
    """What a GGUF file leaves out is off."""
    published = c.kind == "hf"
    return RouterSpec(
        scoring="sigmoid",
        normalize=c.flag("norm_topk_prob", published),
        scale=c.number("routed_scaling_factor", 2.5 if published else 1.0),
        correction=True,
        **latent.groups(c, None),
        group_score="top2",
    )


def translate(c: Fields) -> ModelConfig:
    positions = c.count("max_position_embeddings", 4096)
    rope = read_rope(c, positions, interleaved=c.flag("rope_interleave", True))
    return latent.translate(c, latent.attention(c, rope), router(c), positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    spec = config.layers[0].attention
    assert isinstance(spec, LatentAttentionSpec)
    return latent.describe(config) | {"rope_interleave": spec.rope.interleaved}


FAMILY = Family(
    model_types=("deepseek_v3", "kimi_k2"),
    architectures=("DeepseekV3ForCausalLM",),
    translate=translate,
    describe=describe,
    rows=latent.ROWS + latent.EXPERTS,
    gguf=("deepseek2",),
    gguf_rows=latent_gguf.rows("deepseek2"),
    gguf_when=lambda fields: fields.any("expert_gating_func", 1) == 2,
    gguf_fields=latent_gguf.fields,
    gguf_names=latent_gguf.NAMES,
    harmless=latent.HARMLESS,
    neutral={
        "expert_gating_func": "sigmoid", "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    },
    ignored=("model.layers.61.*",),  # The published models' 61 layers are followed by one that guesses further tokens.
)  # fmt: skip
