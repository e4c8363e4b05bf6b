"""StableLM 3B, 2 1.6B and 2 12B: LayerNorm, heads that turn in part; 12B: one norm for both branches, normed heads."""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import read_rope, rotary_dims, share
from jaxlm.conversion.transforms import HeadsApart

AT = "model.layers.{i}."


def translate(c: Fields) -> ModelConfig:
    positions, heads = c.count("max_position_embeddings", 4096), standard.heads(c, kv_default=32)
    rope = read_rope(c, positions, dims=rotary_dims(c, heads["head_dim"], 0.25))
    eps, parallel = c.number("layer_norm_eps", 1e-5), c.flag("use_parallel_residual", False)
    attention = AttentionSpec(
        **heads, rope=rope, qkv_bias=c.flag("use_qkv_bias", False), qk_norm_over="heads",
        qk_norm=NormSpec("layer", eps) if c.flag("qk_layernorm", False) else None,
    )  # fmt: skip
    ffn = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "silu"))
    layer = LayerSpec(attention, ffn, NormSpec("layer", eps, bias=True), parallel=parallel, shared_norm=parallel)
    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    layer, attention = config.layers[0], standard.attention_of(config.layers[0])
    assert attention.rope
    return standard.describe_layer_norm(config, "head_dim") | {
        "partial_rotary_factor": share(attention.rope.dims, attention.head_dim),
        "qk_layernorm": attention.qk_norm is not None,
        "use_parallel_residual": layer.parallel,
        "use_qkv_bias": attention.qkv_bias,
    }


def gguf_fields(metadata: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """What the metadata says of the residual is not what readers of these files go by."""
    return {
        "qk_layernorm": "blk.0.attn_q_norm.weight" in tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
        "use_qkv_bias": "blk.0.attn_q.bias" in tensors,
    }


FAMILY = Family(
    model_types=("stablelm",),
    architectures=("StableLmForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        *standard.ROWS,
        Row("final_norm.bias", "model.norm.bias"),
        Row("attn_norm.bias", AT + "input_layernorm.bias"),
        Row("ffn_norm.bias", AT + "post_attention_layernorm.bias"),
        Row("attn.q_norm.scale", AT + "self_attn.q_layernorm.norms.{e}.weight"),
        Row("attn.k_norm.scale", AT + "self_attn.k_layernorm.norms.{e}.weight"),
    ),
    gguf=("stablelm",),
    gguf_rows=gguf_rows("stablelm", {"attn.q_norm.scale": HeadsApart(), "attn.k_norm.scale": HeadsApart()}),
    gguf_fields=gguf_fields,
)
