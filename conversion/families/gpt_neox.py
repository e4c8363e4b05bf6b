"""GPT-NeoX and Pythia: attention and FFN side by side with a norm each, heads that turn in part, q, k, v by head."""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import read_rope, rotary_dims, share
from jaxlm.conversion.standard import QKV
from jaxlm.conversion.transforms import Fused, GroupedQKV

AT = "gpt_neox.layers.{i}."


def translate(c: Fields) -> ModelConfig:
    positions, bias, heads = c.count("max_position_embeddings", 2048), c.flag("attention_bias", True), standard.heads(c)
    rope = read_rope(c, positions, dims=rotary_dims(c, heads["head_dim"], 0.25))
    attention = AttentionSpec(**heads, rope=rope, qkv_bias=bias, out_bias=bias)
    ffn = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "gelu"), gated=False, bias=True)
    norm = NormSpec("layer", c.number("layer_norm_eps", 1e-5), bias=True)
    layer = LayerSpec(attention, ffn, norm, parallel=c.flag("use_parallel_residual", True))
    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    layer, attention = config.layers[0], standard.attention_of(config.layers[0])
    assert attention.rope
    return standard.describe_layer_norm(config, "num_key_value_heads", "head_dim") | {
        "attention_bias": attention.qkv_bias,
        "partial_rotary_factor": share(attention.rope.dims, attention.head_dim),
        "use_parallel_residual": layer.parallel,
    }


def gguf_fields(metadata: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_qkv.bias" in tensors}


FAMILY = Family(
    model_types=("gpt_neox",),
    architectures=("GPTNeoXForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        Row("embed.table", "gpt_neox.embed_in.weight"),
        Row("lm_head.table", "embed_out.weight"),
        Row("lm_head.table", "lm_head.weight"),
        *standard.linear_rows({"final_norm": "gpt_neox.final_layer_norm"}),
        *standard.linear_rows(
            {
                "attn_norm": AT + "input_layernorm", QKV: AT + "attention.query_key_value",
                "attn.o": AT + "attention.dense", "ffn_norm": AT + "post_attention_layernorm",
                "ffn.up": AT + "mlp.dense_h_to_4h", "ffn.down": AT + "mlp.dense_4h_to_h",
            },
            {QKV: (GroupedQKV(), GroupedQKV())},
        ),
    ),
    gguf=("gptneox",),
    gguf_rows=(*gguf_rows("gptneox"), *standard.linear_rows({QKV: "blk.{i}.attn_qkv"}, {QKV: (Fused(), Fused())})),
    gguf_fields=gguf_fields,
    aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    harmless=(
        "attention_probs_dropout_prob", "classifier_dropout", "gradient_checkpointing", "hidden_dropout_prob",
        "weight_decay",
    ),
    ignored=("*.attention.bias", "*.attention.masked_bias"),
)  # fmt: skip
