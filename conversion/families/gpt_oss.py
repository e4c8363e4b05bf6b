"""gpt-oss: sinks, every other layer with a window, clamped experts with biases, MXFP4 weights."""

from dataclasses import replace
from typing import Any

from jaxlm.config import (
    AttentionSpec,
    FFNSpec,
    LayerSpec,
    ModelConfig,
    MoESpec,
    NormSpec,
    RopeSpec,
    RouterSpec,
    YarnScaling,
)
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.mxfp4 import Mxfp4
from jaxlm.conversion.rope_settings import agreed, read_rope
from jaxlm.conversion.transforms import Fused, Transposed

GATE_UP, GATE_UP_BIAS = ("ffn.experts.gate", "ffn.experts.up"), ("ffn.experts.gate_bias", "ffn.experts.up_bias")
AT = "model.layers.{i}."
EXPERTS = AT + "mlp.experts."


def read_turning(c: Fields, positions: int) -> RopeSpec:
    """GGUF files do not say that the ramp's ends are not rounded, as is so in the published models."""
    if c.kind == "hf" and "rope_scaling" not in c:
        c.any("rope_parameters")
    rope = read_rope(c, positions, 150000.0)
    if c.kind == "gguf" and isinstance(rope.scaling, YarnScaling):
        return replace(rope, scaling=replace(rope.scaling, truncate=False))
    return rope


def experts(c: Fields) -> MoESpec:
    count = agreed(c, "num_local_experts", [c.count(n, None) for n in ("num_local_experts", "num_experts")], None)
    expert = FFNSpec(
        c.count("intermediate_size"), "quick_gelu", bias=True, clamp=c.number("swiglu_limit", 7.0), up_offset=1.0
    )
    return MoESpec(count or c.count("num_local_experts"), c.count("num_experts_per_tok"), expert, RouterSpec(bias=True))


def translate(c: Fields) -> ModelConfig:
    positions, bias = c.count("max_position_embeddings", 131072), c.flag("attention_bias", True)
    heads, rope = standard.heads(c, kv_default=8, dim_default=64), read_turning(c, positions)
    windows, moe = standard.windows(c, period=2, default=128), experts(c)
    norm = NormSpec(eps=c.number("rms_norm_eps", 1e-5))

    def layer(i: int) -> LayerSpec:
        attention = AttentionSpec(**heads, rope=rope, window=windows[i], qkv_bias=bias, out_bias=bias, sinks=True)
        return LayerSpec(attention, moe, norm)

    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    layers = [standard.attention_of(layer) for layer in config.layers]
    moe = config.layers[0].ffn
    assert isinstance(moe, MoESpec)
    fields = standard.describe(config)
    for name in ("moe_intermediate_size", "norm_topk_prob", "num_experts"):
        del fields[name]
    return fields | {
        "hidden_act": "silu",
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.expert.intermediate_size,
        "swiglu_limit": moe.expert.clamp,
        "attention_bias": layers[0].qkv_bias,
        "sliding_window": max(a.window for a in layers) or None,
        "layer_types": ["sliding_attention" if a.window else "full_attention" for a in layers],
    }


FAMILY = Family(
    model_types=("gpt_oss",),
    architectures=("GptOssForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        *standard.ROWS,
        Row("attn.sinks", AT + "self_attn.sinks"),
        Row("ffn.router.weight", AT + "mlp.router.weight"),
        Row("ffn.router.bias", AT + "mlp.router.bias"),
        Row(GATE_UP, EXPERTS + "gate_up_proj", Fused(axis=-1, interleaved=True, part=Transposed())),
        Row(GATE_UP_BIAS, EXPERTS + "gate_up_proj_bias", Fused(axis=-1, interleaved=True)),
        Row("ffn.experts.down", EXPERTS + "down_proj", Transposed()),
        Row("ffn.experts.down_bias", EXPERTS + "down_proj_bias"),
        Row(GATE_UP, (EXPERTS + "gate_up_proj_blocks", EXPERTS + "gate_up_proj_scales"), Mxfp4()),
        Row("ffn.experts.down", (EXPERTS + "down_proj_blocks", EXPERTS + "down_proj_scales"), Mxfp4()),
    ),
    gguf=("gpt-oss",),
    gguf_rows=gguf_rows("gpt-oss", targets={"blk.{bid}.post_attention_norm": ("ffn_norm.scale", "")}),
    gguf_names={"expert_feed_forward_length": "intermediate_size", "feed_forward_length": "dense_size"},
    gguf_fields=lambda metadata, tensors: {"attention_bias": "blk.0.attn_q.bias" in tensors},
    harmless=(
        "dense_size", "experts_per_token", "initial_context_length", "quantization_config", "router_aux_loss_coef",
    ),
    neutral={"hidden_act": "silu", "swiglu_alpha": 1.702},
    quantization=("mxfp4",),
)  # fmt: skip
