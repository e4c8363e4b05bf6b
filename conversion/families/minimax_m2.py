"""MiniMax M2: queries and keys normalised over all heads, partly turned, experts by sigmoid and a correction."""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, MoESpec, NormSpec, RouterSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import agreed, read_rope, rotary_dims, share

MOE = "model.layers.{i}.block_sparse_moe."
GATING = {2: "sigmoid"}  # gguf.ExpertGatingFuncType


def turning(c: Fields, head_dim: int) -> int:
    """How many lanes turn: rotary_dim, or the share of the head that partial_rotary_factor gives."""
    named = c.count("rotary_dim", None)
    if named is not None and named > head_dim:
        raise c.error("rotary_dim", f"up to the head width {head_dim}")
    return agreed(c, "rotary_dim", [named, rotary_dims(c, head_dim, named / head_dim if named else 1.0)], head_dim)


def check_kinds(c: Fields) -> None:
    """Refuse layers of the linear kind, which this family's published code has no more."""
    kinds = c.numbers("attn_type_list", ())
    if set(kinds) - {1.0}:
        raise c.error("attn_type_list", "1 for every layer")


def translate(c: Fields) -> ModelConfig:
    check_kinds(c)
    positions, norm = c.count("max_position_embeddings", 196608), NormSpec(eps=c.number("rms_norm_eps", 1e-6))
    heads = standard.heads(c, kv_default=8, dim_default=128)
    rope = read_rope(c, positions, 5e6 if c.kind == "hf" else 1e4, dims=turning(c, heads["head_dim"]))
    attention = AttentionSpec(**heads, rope=rope, qk_norm=norm, qk_norm_over="full")
    count = agreed(c, "num_local_experts", [c.count(n, None) for n in ("num_local_experts", "num_experts")], 256)
    expert = FFNSpec(c.count("intermediate_size", 1536), c.activation("hidden_act", "silu"))
    router = RouterSpec(scoring="sigmoid", correction=True)
    layer = LayerSpec(attention, MoESpec(count, c.count("num_experts_per_tok", 8), expert, router), norm)
    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    fields, attention = standard.describe(config), standard.attention_of(config.layers[0])
    assert attention.rope
    experts = {"num_local_experts": fields.pop("num_experts"), "intermediate_size": fields.pop("moe_intermediate_size")}
    fields.pop("norm_topk_prob")
    return fields | experts | {"partial_rotary_factor": share(attention.rope.dims, attention.head_dim)}


def gguf_fields(metadata: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """The width of an expert is there twice."""
    fields = {"intermediate_size": metadata.get("expert_feed_forward_length", metadata.get("feed_forward_length"))}
    if "expert_gating_func" in metadata:
        fields["expert_gating_func"] = GATING.get(metadata["expert_gating_func"], metadata["expert_gating_func"])
    return fields


BETAS = ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta")
FAMILY = Family(
    model_types=("minimax_m2",),
    architectures=("MiniMaxM2ForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        *standard.ROWS,
        *standard.QK_NORMS,
        Row("ffn.router.weight", MOE + "gate.weight"),
        Row("ffn.router.correction", MOE + "e_score_correction_bias"),
        Row("ffn.experts.gate", MOE + "experts.{e}.w1.weight"),
        Row("ffn.experts.up", MOE + "experts.{e}.w3.weight"),
        Row("ffn.experts.down", MOE + "experts.{e}.w2.weight"),
    ),
    gguf=("minimax-m2",),
    gguf_rows=gguf_rows("minimax-m2"),
    gguf_fields=gguf_fields,
    gguf_names={"expert_feed_forward_length": "intermediate_size"},
    # Training, and layers that guess further tokens, which published checkpoints do not hold.
    harmless=(
        "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "router_aux_loss_coef",
        "router_jitter_noise", "shared_moe_mode", "use_mtp",
    ),
    neutral={
        **dict.fromkeys(BETAS, 1.0), "expert_gating_func": "sigmoid", "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_qk_norm": True, "use_routing_bias": True,
    },
)  # fmt: skip
