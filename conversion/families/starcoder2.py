"""StarCoder2: LayerNorm, biases everywhere or nowhere, an FFN without a gate, a window where the config has one."""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import read_rope

AT = "model.layers.{i}."


def translate(c: Fields) -> ModelConfig:
    positions, bias = c.count("max_position_embeddings", 4096), c.flag("use_bias", True)
    attention = AttentionSpec(
        **standard.heads(c, kv_default=2), rope=read_rope(c, positions), qkv_bias=bias, out_bias=bias,
        window=c.count("sliding_window", 0, null=0),
    )  # fmt: skip
    inner = c.count("intermediate_size")
    ffn = FFNSpec(inner, c.activation("hidden_act", "gelu_pytorch_tanh"), gated=False, bias=bias)
    layer = LayerSpec(attention, ffn, NormSpec("layer", c.number("layer_norm_eps", 1e-5), bias=True))
    tied = c.flag("tie_word_embeddings", True)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    attention = standard.attention_of(config.layers[0])
    return standard.describe_layer_norm(config) | {
        "sliding_window": attention.window or None,
        "use_bias": attention.qkv_bias,
    }


def gguf_fields(metadata: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    return {"use_bias": "blk.0.attn_q.bias" in tensors}


FAMILY = Family(
    model_types=("starcoder2",),
    architectures=("Starcoder2ForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        Row("embed.table", "model.embed_tokens.weight"),
        *standard.linear_rows(
            {
                "final_norm": "model.norm", "lm_head": "lm_head", "attn_norm": AT + "input_layernorm",
                "attn.q": AT + "self_attn.q_proj", "attn.k": AT + "self_attn.k_proj", "attn.v": AT + "self_attn.v_proj",
                "attn.o": AT + "self_attn.o_proj", "ffn_norm": AT + "post_attention_layernorm",
                "ffn.up": AT + "mlp.c_fc", "ffn.down": AT + "mlp.c_proj",
            }
        ),
    ),
    gguf=("starcoder2",),
    gguf_rows=gguf_rows("starcoder2"),
    gguf_fields=gguf_fields,
    aliases={"norm_epsilon": "layer_norm_eps"},
    harmless=(
        "attention_softmax_in_fp32", "embedding_dropout", "residual_dropout", "scale_attention_softmax_in_fp32",
    ),
    neutral={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
)  # fmt: skip
