"""What the families with latent attention share: DeepSeek's names and fields, and the config.json of such a model."""

import math
from typing import Any

from jaxlm.config import (
    FFNSpec,
    LatentAttentionSpec,
    LayerSpec,
    ModelConfig,
    MoESpec,
    NormSpec,
    QueryScaling,
    RopeSpec,
    RouterSpec,
    YarnScaling,
)
from jaxlm.conversion import standard
from jaxlm.conversion.family import Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.rope_settings import agreed, describe_rope, mscale, rope_blocks
from jaxlm.conversion.transforms import FusedHeads

AT = "model.layers.{i}.self_attn."
MLP = "model.layers.{i}.mlp."
ROWS = (
    *(row for row in standard.ROWS if row.target not in ("attn.k", "attn.v")),
    Row("attn.q_down", AT + "q_a_proj.weight"),
    Row("attn.q_down_bias", AT + "q_a_proj.bias"),
    Row("attn.q_norm.scale", AT + "q_a_layernorm.weight"),
    Row("attn.q_up", AT + "q_b_proj.weight"),
    Row("attn.kv_down", AT + "kv_a_proj_with_mqa.weight"),
    Row("attn.kv_down_bias", AT + "kv_a_proj_with_mqa.bias"),
    Row("attn.kv_norm.scale", AT + "kv_a_layernorm.weight"),
    Row(("attn.k_up", "attn.v_up"), AT + "kv_b_proj.weight", FusedHeads()),
    Row("ffn.router.weight", MLP + "gate.weight"),
    Row("ffn.router.correction", MLP + "gate.e_score_correction_bias"),
    Row("ffn.shared.gate", MLP + "shared_experts.gate_proj.weight"),
    Row("ffn.shared.up", MLP + "shared_experts.up_proj.weight"),
    Row("ffn.shared.down", MLP + "shared_experts.down_proj.weight"),
    Row("ffn.shared.gate_bias", MLP + "shared_experts.gate_proj.bias"),
    Row("ffn.shared.up_bias", MLP + "shared_experts.up_proj.bias"),
    Row("ffn.shared.down_bias", MLP + "shared_experts.down_proj.bias"),
)
EXPERTS = (
    Row("ffn.experts.gate", MLP + "experts.{e}.gate_proj.weight"),
    Row("ffn.experts.up", MLP + "experts.{e}.up_proj.weight"),
    Row("ffn.experts.down", MLP + "experts.{e}.down_proj.weight"),
)
# Repeats of other fields, training, and layers that only guess further tokens.
HARMLESS = (
    "aux_loss_alpha", "ep_size", "head_dim", "max_position_embeddings", "num_mtp_layers", "num_nextn_predict_layers",
    "qk_head_dim", "router_aux_loss_coef", "seq_aux",
    "attention.key_length_mla", "attention.value_length", "attention.value_length_mla",
)  # fmt: skip


def attention(c: Fields, rope: RopeSpec, queries: QueryScaling | None = None) -> LatentAttentionSpec:
    """The latent's own norms have their fixed epsilon. A GGUF file counts the latent as the one key/value head."""
    heads, bias = c.count("num_attention_heads"), c.flag("attention_bias", False)
    if c.count("num_key_value_heads", heads, null=heads) not in ((heads,) if c.kind == "hf" else (heads, 1)):
        raise c.error("num_key_value_heads", f"num_attention_heads = {heads}")
    nope, turning = c.count("qk_nope_head_dim"), c.count("qk_rope_head_dim")
    return LatentAttentionSpec(
        num_heads=heads,
        kv_rank=c.count("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=turning,
        value_dim=c.count("v_head_dim"),
        rope=rope,
        norm=NormSpec(eps=1e-6),
        q_rank=c.count("q_lora_rank", 1536 if c.kind == "hf" else 0, null=0),
        qkv_bias=bias,
        out_bias=bias,
        scale=scale(c, rope, nope + turning),
        query_scaling=queries,
    )


def scale(c: Fields, rope: RopeSpec, width: int) -> float | None:
    """Scores are sharpened for the grown context where mscale_all_dim says how much."""
    much = agreed(c, "mscale_all_dim", [b.number("mscale_all_dim", None) for b in rope_blocks(c)], 0.0)
    if c.kind == "gguf":
        much = round(10 * much, 6)  # Stored as a float32 tenth.
    if not isinstance(rope.scaling, YarnScaling) or not much:
        return None
    return width**-0.5 * mscale(rope.scaling.factor, much) ** 2


def groups(c: Fields, default: int | None) -> dict[str, Any]:
    """Groups of experts; older GGUF files lack them, and only default None makes that an error."""
    rest = {} if default is None else {"default": default, "null": default}
    return {"groups": c.count("n_group", **rest), "top_groups": c.count("topk_group", **rest)}


def translate(
    c: Fields, attention: LatentAttentionSpec, router: RouterSpec, positions: int, mlp_bias: bool = False
) -> ModelConfig:
    """The first layers dense, the others with experts, of which some work on every token."""
    act, width = c.activation("hidden_act", "silu"), c.count("moe_intermediate_size")
    experts = MoESpec(
        c.count("n_routed_experts"),
        c.count("num_experts_per_tok"),
        FFNSpec(width, act),
        router,
        shared=FFNSpec(width * c.count("n_shared_experts"), act, bias=mlp_bias),
    )
    dense = FFNSpec(c.count("intermediate_size"), act, bias=mlp_bias)
    first = c.count("first_k_dense_replace", 0, null=0, least=0)
    norm = NormSpec(eps=c.number("rms_norm_eps", 1e-6))
    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(
        c,
        lambda i: LayerSpec(attention, dense if i < first else experts, norm),
        tie_embeddings=tied,
        max_positions=positions,
    )


def describe(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that `attention` and `translate` read."""
    spec = config.layers[0].attention
    assert isinstance(spec, LatentAttentionSpec)
    dense = [layer.ffn for layer in config.layers if isinstance(layer.ffn, FFNSpec)]
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_heads,
        "q_lora_rank": spec.q_rank or None,
        "kv_lora_rank": spec.kv_rank,
        "qk_nope_head_dim": spec.nope_dim,
        "qk_rope_head_dim": spec.rope_dim,
        "v_head_dim": spec.value_dim,
        "attention_bias": spec.qkv_bias,
        "rms_norm_eps": config.layers[0].norm.eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "first_k_dense_replace": len(dense),
    }
    return fields | describe_turning(spec, config.max_positions) | describe_experts(config, dense)


def describe_turning(spec: LatentAttentionSpec, positions: int) -> dict[str, Any]:
    fields = describe_rope(spec.rope, positions, spec.rope_dim)
    if spec.scale is not None and isinstance(spec.rope.scaling, YarnScaling):
        sharper = math.sqrt(spec.scale * math.sqrt(spec.nope_dim + spec.rope_dim))
        much = round((sharper - 1) / (0.1 * math.log(spec.rope.scaling.factor)), 6)
        for name in ("rope_parameters", "rope_scaling"):
            fields[name]["mscale_all_dim"] = much
    return fields


def describe_experts(config: ModelConfig, dense: list[FFNSpec]) -> dict[str, Any]:
    moe = next(layer.ffn for layer in reversed(config.layers) if isinstance(layer.ffn, MoESpec))
    assert moe.shared
    width = moe.expert.intermediate_size
    return {
        "hidden_act": moe.expert.activation,
        "intermediate_size": dense[0].intermediate_size if dense else width,
        "moe_intermediate_size": width,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared.intermediate_size // width,
        "num_experts_per_tok": moe.top_k,
        "n_group": moe.router.groups,
        "topk_group": moe.router.top_groups,
        "norm_topk_prob": moe.router.normalize,
        "routed_scaling_factor": moe.router.scale,
    }
