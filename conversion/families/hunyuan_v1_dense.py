"""Hunyuan dense: queries and keys normalised per head after the rotation, whose theta a fixed alpha may stretch."""

from dataclasses import replace
from typing import Any

from jaxlm.config import AttentionSpec, DynamicScaling, FFNSpec, LayerSpec, ModelConfig, NormSpec, RopeSpec
from jaxlm.conversion import standard
from jaxlm.conversion.families.qwen2 import gguf_bias
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import agreed, read_rope, rope_blocks

# Special ids, and settings of parts that are off.
_HARMLESS = """
    attention_head_dim beta_fast beta_slow cla_share_factor class_num dense_list enable_lm_head_fp32 eod_token_id
    im_end_id im_newline_id im_start_id mask_init_id mscale mscale_all_dim org_vocab_size pad_id pool_type
    skip_cls_token text_end_id text_start_id
"""


def stretched(c: Fields, rope: RopeSpec, head_dim: int) -> RopeSpec:
    """With alpha, the scaling that is called dynamic does not depend on the context: theta grows once and for all."""
    alpha = agreed(c, "alpha", [block.number("alpha", None) for block in rope_blocks(c)], 0.0)
    if not alpha:
        return rope
    if not isinstance(rope.scaling, DynamicScaling) or alpha < 0:
        raise c.error("rope_scaling" if "rope_scaling" in c else "rope_parameters", "alpha above 0 in the kind dynamic")
    return replace(rope, theta=rope.theta * alpha ** (head_dim / (head_dim - 2)), scaling=None)


def translate(c: Fields) -> ModelConfig:
    positions, bias = c.count("max_position_embeddings", 2048), c.flag("attention_bias", False)
    heads, norm = standard.heads(c), NormSpec(eps=c.number("rms_norm_eps", 1e-5))
    attention = AttentionSpec(
        **heads,
        rope=stretched(c, read_rope(c, positions), heads["head_dim"]),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=norm,
        qk_norm_after_rope=True,
    )
    layer = LayerSpec(attention, FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "silu")), norm)
    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    return standard.describe(config) | {"attention_bias": standard.attention_of(config.layers[0]).qkv_bias}


FAMILY = Family(
    model_types=("hunyuan_v1_dense",),
    architectures=("HunYuanDenseV1ForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        *standard.ROWS,
        Row("attn.q_norm.scale", "model.layers.{i}.self_attn.query_layernorm.weight"),
        Row("attn.k_norm.scale", "model.layers.{i}.self_attn.key_layernorm.weight"),
    ),
    gguf=("hunyuan-dense",),
    gguf_rows=gguf_rows("hunyuan-dense"),
    gguf_fields=gguf_bias,
    harmless=tuple(_HARMLESS.split()),
    neutral={
        "add_classification_head": False, "mlp_bias": False, "norm_type": "rms", "num_experts": 1, "use_cla": False,
        "use_qk_norm": True, "use_rotary_pos_emb": True,
    },
)  # fmt: skip
