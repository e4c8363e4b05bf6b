"""Falcon 7B, 40B, 180B, RW and Falcon 2: one or two norms, side by side or not, groups of heads, rotation or ALiBi."""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import read_rope
from jaxlm.conversion.standard import QKV
from jaxlm.conversion.transforms import Fused, GroupedQKV

AT = "transformer.h.{i}."


def read_heads(c: Fields, newer: bool) -> dict[str, Any]:
    """Counts of heads: the older form has one key/value head or as many as query heads, whatever num_kv_heads says."""
    heads = standard.heads(c)
    if newer:
        return heads
    if c.flag("multi_query", True):
        return heads | {"num_kv_heads": 1}
    if heads["num_kv_heads"] != heads["num_heads"]:
        raise c.error("num_key_value_heads", "num_attention_heads where neither multi_query nor the newer form is on")
    return heads


def read_norms(c: Fields, newer: bool) -> dict[str, Any]:
    """How many norms a layer has, and whether its branches work side by side."""
    parallel = c.flag("parallel_attn", True)
    count = c.count("num_ln_in_parallel_attn", 1 + newer, null=1 + newer)
    if newer and not parallel:
        raise c.error("parallel_attn", "true where new_decoder_architecture is")
    if count > 1 + newer:
        raise c.error("num_ln_in_parallel_attn", "1, or 2 where new_decoder_architecture is on")
    return {"parallel": parallel, "shared_norm": parallel and count == 1}


def translate(c: Fields) -> ModelConfig:
    positions, width, bias = c.count("max_position_embeddings", 2048), c.count("hidden_size"), c.flag("bias", False)
    newer, alibi = c.flag("new_decoder_architecture", False), c.flag("alibi", False)
    c.flag("multi_query", True)
    heads, rope = read_heads(c, newer), read_rope(c, positions)
    slopes = standard.alibi_slopes(heads["num_heads"]) if alibi else ()
    attention = AttentionSpec(
        **heads, rope=None if alibi else rope, qkv_bias=bias, out_bias=bias, alibi=slopes, alibi_bfloat16=alibi
    )
    inner = c.count("intermediate_size", 4 * width, null=4 * width)
    ffn = FFNSpec(inner, c.activation("hidden_act", "gelu"), gated=False, bias=bias)
    norm = NormSpec("layer", c.number("layer_norm_eps", 1e-5), bias=True)
    layer = LayerSpec(attention, ffn, norm, **read_norms(c, newer))
    tied = c.flag("tie_word_embeddings", True)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    layer, attention = config.layers[0], standard.attention_of(config.layers[0])
    return standard.describe_layer_norm(config, "head_dim") | {
        "alibi": bool(attention.alibi),
        "bias": attention.qkv_bias,
        "multi_query": attention.num_kv_heads == 1,
        "new_decoder_architecture": has_two(config) or 1 < attention.num_kv_heads < attention.num_heads,
        "num_ln_in_parallel_attn": 1 + has_two(config),
        "parallel_attn": layer.parallel,
    }


def has_two(config: ModelConfig) -> bool:
    """Whether two branches side by side have a norm each."""
    return config.layers[0].parallel and not config.layers[0].shared_norm


def gguf_fields(metadata: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """Such files hold rotary models with branches side by side only; all fit the newer form."""
    return {
        "bias": "blk.0.attn_qkv.bias" in tensors,
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 1 + ("blk.0.attn_norm_2.weight" in tensors),
    }


FAMILY = Family(
    model_types=("falcon",),
    architectures=("FalconForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        Row("embed.table", "transformer.word_embeddings.weight"),
        *standard.linear_rows({"final_norm": "transformer.ln_f", "lm_head": "lm_head"}),
        *standard.linear_rows({"attn_norm": AT + "ln_attn", "ffn_norm": AT + "ln_mlp"}, when=has_two),
        *standard.linear_rows(
            {"attn_norm": AT + "input_layernorm", "ffn_norm": AT + "post_attention_layernorm"},
            when=lambda config: not has_two(config),
        ),
        *standard.linear_rows(
            {
                QKV: AT + "self_attention.query_key_value", "attn.o": AT + "self_attention.dense",
                "ffn.up": AT + "mlp.dense_h_to_4h", "ffn.down": AT + "mlp.dense_4h_to_h",
            },
            {QKV: (GroupedQKV(), GroupedQKV())},
        ),
    ),
    gguf=("falcon",),
    gguf_rows=(
        *standard.linear_rows({"attn_norm": "blk.{i}.attn_norm_2", "ffn_norm": "blk.{i}.attn_norm"}, when=has_two),
        *gguf_rows("falcon"),
        *standard.linear_rows({QKV: "blk.{i}.attn_qkv"}, {QKV: (Fused(), Fused())}),
    ),
    gguf_fields=gguf_fields,
    aliases={
        "num_kv_heads": "num_key_value_heads", "ffn_hidden_size": "intermediate_size", "activation": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    neutral={"apply_residual_connection_post_layernorm": False, "tensor_data_layout": "jploski"},
)  # fmt: skip
