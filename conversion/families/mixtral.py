"""Mixtral: Mistral with experts, the best two of softmax scores and weights that sum to one."""

from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, MoESpec, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import agreed, read_rope
from jaxlm.conversion.transforms import PairedRows


def translate(c: Fields) -> ModelConfig:
    positions = c.count("max_position_embeddings", 4096 * 32)
    theta = 1e6 if c.kind == "hf" else 1e4
    attention = AttentionSpec(
        **standard.heads(c, kv_default=8),
        rope=read_rope(c, positions, theta),
        window=c.count("sliding_window", 0, null=0),
    )
    count = agreed(c, "num_local_experts", [c.count(n, None) for n in ("num_local_experts", "num_experts")], 8)
    expert = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "silu"))
    experts = MoESpec(count, c.count("num_experts_per_tok", 2), expert)
    layer = LayerSpec(attention, experts, NormSpec(eps=c.number("rms_norm_eps", 1e-5)))
    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    fields = standard.describe(config)
    experts = {"num_local_experts": fields.pop("num_experts"), "intermediate_size": fields.pop("moe_intermediate_size")}
    fields.pop("norm_topk_prob")
    return fields | experts | {"sliding_window": standard.attention_of(config.layers[0]).window or None}


FAMILY = Family(
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        *standard.ROWS,
        Row("ffn.router.weight", "model.layers.{i}.block_sparse_moe.gate.weight"),
        Row("ffn.experts.gate", "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight"),
        Row("ffn.experts.up", "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight"),
        Row("ffn.experts.down", "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight"),
    ),
    gguf=("llama",),
    gguf_rows=gguf_rows("llama", {t: PairedRows() for t in ("attn.q", "attn.k")}),
    gguf_when=lambda fields: bool(fields.any("num_experts", 0)),
    harmless=("router_aux_loss_coef", "router_jitter_noise"),
)
