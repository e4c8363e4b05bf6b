"""OPT: learned positions that begin at row 2, LayerNorm, ReLU. Not the form that normalises after (350M)."""

from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, LearnedPositions, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields

AT = "model.decoder.layers.{i}."
OFFSET = 2
EPS = 1e-5  # Fixed in the published code.


def translate(c: Fields) -> ModelConfig:
    positions, width = c.count("max_position_embeddings", 2048), c.count("hidden_size")
    bias = c.flag("enable_bias", True)
    if c.count("word_embed_proj_dim", width, null=width) != width:
        raise c.error("word_embed_proj_dim", f"hidden_size = {width}")
    attention = AttentionSpec(**standard.heads(c), rope=None, qkv_bias=bias, out_bias=bias)
    ffn = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "relu"), gated=False, bias=bias)
    affine = c.flag("layer_norm_elementwise_affine", True)
    layer = LayerSpec(attention, ffn, NormSpec("layer", EPS, bias=affine, scale=affine))
    return standard.model_config(
        c, lambda i: layer, tie_embeddings=c.flag("tie_word_embeddings", True), max_positions=positions,
        positions=LearnedPositions(positions + OFFSET, OFFSET),
    )  # fmt: skip


def describe(config: ModelConfig) -> dict[str, Any]:
    layer = config.layers[0]
    return standard.describe_layer_norm(config, "num_key_value_heads", "head_dim", "layer_norm_eps") | {
        "enable_bias": standard.attention_of(layer).qkv_bias,
        "layer_norm_elementwise_affine": layer.norm.scale,
    }


FAMILY = Family(
    model_types=("opt",),
    architectures=("OPTForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        Row("embed.table", "model.decoder.embed_tokens.weight"),
        Row("embed.positions", "model.decoder.embed_positions.weight"),
        *standard.linear_rows(
            {
                "lm_head": "lm_head", "final_norm": "model.decoder.final_layer_norm",
                "attn_norm": AT + "self_attn_layer_norm", "attn.q": AT + "self_attn.q_proj",
                "attn.k": AT + "self_attn.k_proj", "attn.v": AT + "self_attn.v_proj",
                "attn.o": AT + "self_attn.out_proj", "ffn_norm": AT + "final_layer_norm",
                "ffn.up": AT + "fc1", "ffn.down": AT + "fc2",
            }
        ),
    ),
    aliases={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
    harmless=("activation_dropout", "dropout", "init_std", "layerdrop"),
    neutral={"_remove_final_layer_norm": False, "do_layer_norm_before": True},
    prefixes=("model.decoder.", "decoder."),
)  # fmt: skip
