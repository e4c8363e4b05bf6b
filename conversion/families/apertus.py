"""Apertus: an FFN without a gate whose activation (xIELU) has weights, queries and keys normalised per head."""

from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, Llama3Scaling, ModelConfig, NormSpec, RopeSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.rope_settings import read_rope, rope_blocks
from jaxlm.conversion.transforms import Scalar

LAYER = "model.layers.{i}."
ACT = LAYER + "mlp.act_fn."
THETA = 12000000.0
SCALING = Llama3Scaling(8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


def rotation(c: Fields, positions: int) -> RopeSpec:
    """A config without rotary settings means those of the published models."""
    if rope_blocks(c):
        return read_rope(c, positions, THETA)
    if c.number("rope_theta", THETA) != THETA:
        raise c.error("rope_theta", f"{THETA:g} where rope_parameters is absent")
    return RopeSpec(THETA, SCALING)


def translate(c: Fields) -> ModelConfig:
    positions, bias = c.count("max_position_embeddings", 65536), c.flag("attention_bias", False)
    norm, rope = NormSpec(eps=c.number("rms_norm_eps", 1e-5)), rotation(c, positions)
    attention = AttentionSpec(**standard.heads(c), rope=rope, qkv_bias=bias, out_bias=bias, qk_norm=norm)
    ffn = FFNSpec(c.count("intermediate_size", 14336), c.activation("hidden_act", "xielu"), gated=False)
    layer = LayerSpec(attention, ffn, norm)
    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    return standard.describe(config) | {"attention_bias": standard.attention_of(config.layers[0]).qkv_bias}


# GGUF files keep the activation's weights among the metadata, where no row finds them.
FAMILY = Family(
    model_types=("apertus",),
    architectures=("ApertusForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        *(row for row in standard.ROWS if row.target not in ("attn_norm.scale", "ffn_norm.scale")),
        *standard.QK_NORMS,
        Row("attn_norm.scale", LAYER + "attention_layernorm.weight"),
        Row("ffn_norm.scale", LAYER + "feedforward_layernorm.weight"),
        *(Row(f"ffn.{name}", ACT + name) for name in ("alpha_p", "alpha_n")),
        *(Row(f"ffn.{name}", ACT + name, Scalar()) for name in ("beta", "eps")),
    ),
    # Left behind by training; the published code has neither.
    neutral={"mlp_bias": False, "post_norm": False, "qk_norm": True},
)
