"""MPT: ALiBi, LayerNorm without biases, clipped queries, keys and values where the config says so."""

from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.standard import QKV
from jaxlm.conversion.transforms import Fused

AT = "transformer.blocks.{i}."


def read_attention(c: Fields) -> AttentionSpec:
    """The settings of attn_config; a GGUF file has them beside the others."""
    own, heads = c.block("attn_config") or c, standard.heads(c)
    clip = own.number("clip_qkv", 0.0)
    if "clip_qkv" in own and clip <= 0:
        raise own.error("clip_qkv", "a number above 0, null")
    slopes = standard.alibi_slopes(heads["num_heads"])
    return AttentionSpec(**heads, rope=None, clip=clip, scale=own.number("softmax_scale", None), alibi=slopes)


def translate(c: Fields) -> ModelConfig:
    inner = 4 * c.count("hidden_size")
    if c.kind == "gguf":
        inner = c.count("intermediate_size", inner)
    norm = NormSpec("layer", c.number("layer_norm_eps", 1e-5))
    layer = LayerSpec(read_attention(c), FFNSpec(inner, "gelu", gated=False), norm)
    tied, positions = c.flag("tie_word_embeddings", True), c.count("max_position_embeddings", 2048)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    attention = standard.attention_of(config.layers[0])
    absent = ("num_key_value_heads", "head_dim", "hidden_act", "intermediate_size")
    return standard.describe_layer_norm(config, *absent) | {
        "attn_config": {"alibi": True, "clip_qkv": attention.clip or None, "softmax_scale": attention.scale}
    }


FAMILY = Family(
    model_types=("mpt",),
    architectures=("MptForCausalLM", "MPTForCausalLM"),
    translate=translate,
    describe=describe,
    rows=(
        Row("embed.table", "transformer.wte.weight"),
        Row("final_norm.scale", "transformer.norm_f.weight"),
        Row("lm_head.table", "lm_head.weight"),
        Row("attn_norm.scale", AT + "norm_1.weight"),
        Row(QKV, AT + "attn.Wqkv.weight", Fused()),
        Row("attn.o", AT + "attn.out_proj.weight"),
        Row("ffn_norm.scale", AT + "norm_2.weight"),
        Row("ffn.up", AT + "ffn.up_proj.weight"),
        Row("ffn.down", AT + "ffn.down_proj.weight"),
    ),
    gguf=("mpt",),
    gguf_rows=(*gguf_rows("mpt"), Row(QKV, "blk.{i}.attn_qkv.weight", Fused())),
    gguf_names={"attention.clamp_kqv": "clip_qkv", "attention.max_alibi_bias": "alibi_bias_max"},
    aliases={
        "d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
    },
    harmless=(
        "attn_impl", "attn_pdrop", "emb_pdrop", "embedding_fraction", "init_config", "init_device", "learned_pos_emb",
        "resid_pdrop", "tokenizer_name", "verbose",
    ),
    neutral={
        "alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention", "attn_uses_sequence_id": False,
        "expansion_ratio": 4, "no_bias": True, "norm_type": ("low_precision_layernorm", "layernorm"),
        "prefix_lm": False, "qk_ln": False,
    },
)  # fmt: skip
