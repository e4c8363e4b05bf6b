"""GLM-4.5 and 4.6: partly turned heads, dense layers first, then experts by sigmoid and a correction, a shared one."""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, MoESpec, NormSpec, RouterSpec
from jaxlm.conversion import latent, standard
from jaxlm.conversion.family import Family
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import read_rope, rotary_dims, share

GATING = {2: "sigmoid"}  # gguf.ExpertGatingFuncType


def router(c: Fields) -> RouterSpec:
    """What a GGUF file leaves out is off."""
    published = c.kind == "hf"
    return RouterSpec(
        scoring="sigmoid",
        normalize=c.flag("norm_topk_prob", published),
        scale=c.number("routed_scaling_factor", 1.0),
        correction=True,
        **latent.groups(c, 1),
        group_score="top2",
    )


def translate(c: Fields) -> ModelConfig:
    positions, norm = c.count("max_position_embeddings", 131072), NormSpec(eps=c.number("rms_norm_eps", 1e-5))
    heads, act = standard.heads(c, kv_default=8), c.activation("hidden_act", "silu")
    attention = AttentionSpec(
        **heads,
        rope=read_rope(c, positions, dims=rotary_dims(c, heads["head_dim"], 0.5)),
        qkv_bias=c.flag("attention_bias", False),
        qk_norm=norm if c.flag("use_qk_norm", False) else None,
    )
    width, shared = c.count("moe_intermediate_size", 1408), c.count("n_shared_experts", 1, null=0, least=0)
    experts = MoESpec(
        c.count("n_routed_experts", 128),
        c.count("num_experts_per_tok", 8),
        FFNSpec(width, act),
        router(c),
        shared=FFNSpec(width * shared, act) if shared else None,
    )
    dense = FFNSpec(c.count("intermediate_size", 10944), act)
    first = c.count("first_k_dense_replace", 1 if c.kind == "hf" else 0, least=0)
    return standard.model_config(
        c,
        lambda i: LayerSpec(attention, dense if i < first else experts, norm),
        tie_embeddings=c.flag("tie_word_embeddings", False),
        max_positions=positions,
    )


def describe(config: ModelConfig) -> dict[str, Any]:
    attention = standard.attention_of(config.layers[0])
    dense = [layer.ffn for layer in config.layers if isinstance(layer.ffn, FFNSpec)]
    fields = standard.describe(config)
    fields.pop("num_experts", None)
    assert attention.rope
    return fields | latent.describe_experts(config, dense) | {
        "first_k_dense_replace": len(dense),
        "attention_bias": attention.qkv_bias,
        "use_qk_norm": attention.qk_norm is not None,
        "partial_rotary_factor": share(attention.rope.dims, attention.head_dim),
        "num_nextn_predict_layers": 0,
    }


def gguf_fields(metadata: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """Layers that guess further tokens are counted among the others; nothing else needs them."""
    fields: dict[str, Any] = {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
    }
    blocks, guessing = metadata.get("block_count"), metadata.get("nextn_predict_layers", 0)
    if type(blocks) is int and type(guessing) is int:
        fields["num_hidden_layers"] = blocks - guessing
    if "expert_gating_func" in metadata:
        fields["expert_gating_func"] = GATING.get(metadata["expert_gating_func"], metadata["expert_gating_func"])
    return fields


EXPERTS = (
    *latent.EXPERTS,
    *(row for row in latent.ROWS if row.targets[0].startswith(("ffn.router", "ffn.shared"))),
)
GUESSING = ("46", "92")  # The published models' layers are followed by one that guesses further tokens.
FAMILY = Family(
    model_types=("glm4_moe",),
    architectures=("Glm4MoeForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(*standard.ROWS, *standard.QK_NORMS, *EXPERTS),
    gguf=("glm4moe",),
    # What these files call post_attention_norm is the norm before the FFN.
    gguf_rows=gguf_rows("glm4moe", targets={"blk.{bid}.post_attention_norm": ("ffn_norm.scale", "")}),
    gguf_fields=gguf_fields,
    gguf_names={
        "expert_count": "n_routed_experts",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor",
        "leading_dense_block_count": "first_k_dense_replace",
    },
    harmless=("nextn_predict_layers", "num_mtp_layers", "num_nextn_predict_layers"),
    neutral={"expert_gating_func": "sigmoid", "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ignored=(*(f"model.layers.{i}.*" for i in GUESSING), *(f"blk.{i}.*" for i in GUESSING)),
)
