"""BLOOM: ALiBi, normed embeddings, LayerNorm, biases everywhere, q, k and v by head."""

from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.standard import QKV
from jaxlm.conversion.transforms import Fused, GroupedQKV

AT = "transformer.h.{i}."


def translate(c: Fields) -> ModelConfig:
    heads, inner = standard.heads(c), 4 * c.count("hidden_size")
    if c.kind == "gguf":
        inner = c.count("intermediate_size", inner)
    slopes = standard.alibi_slopes(heads["num_heads"])
    attention = AttentionSpec(**heads, rope=None, qkv_bias=True, out_bias=True, alibi=slopes)
    norm = NormSpec("layer", c.number("layer_norm_eps", 1e-5), bias=True)
    layer = LayerSpec(attention, FFNSpec(inner, "gelu_tanh", gated=False, bias=True), norm)
    return standard.model_config(
        c, lambda i: layer, tie_embeddings=c.flag("tie_word_embeddings", True), embed_norm=norm,
        max_positions=c.count("max_position_embeddings", 2048),
    )  # fmt: skip


def describe(config: ModelConfig) -> dict[str, Any]:
    absent = ("num_key_value_heads", "head_dim", "hidden_act", "intermediate_size")
    return standard.describe_layer_norm(config, *absent)


FAMILY = Family(
    model_types=("bloom",),
    architectures=("BloomForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        Row("embed.table", "transformer.word_embeddings.weight"),
        *standard.linear_rows(
            {
                "embed.norm": "transformer.word_embeddings_layernorm", "final_norm": "transformer.ln_f",
                "lm_head": "lm_head",
            }
        ),
        *standard.linear_rows(
            {
                "attn_norm": AT + "input_layernorm", QKV: AT + "self_attention.query_key_value",
                "attn.o": AT + "self_attention.dense", "ffn_norm": AT + "post_attention_layernorm",
                "ffn.up": AT + "mlp.dense_h_to_4h", "ffn.down": AT + "mlp.dense_4h_to_h",
            },
            {QKV: (GroupedQKV(), GroupedQKV())},
        ),
    ),
    gguf=("bloom",),
    gguf_rows=(*gguf_rows("bloom"), *standard.linear_rows({QKV: "blk.{i}.attn_qkv"}, {QKV: (Fused(), Fused())})),
    aliases={
        "n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "layer_norm_epsilon": "layer_norm_eps", "seq_length": "max_position_embeddings",
    },
    harmless=(
        "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "pretraining_tp",
        "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "unk_token_id",
    ),
    neutral={"apply_residual_connection_post_layernorm": False},
    prefixes=("transformer.", ""),
)  # fmt: skip
