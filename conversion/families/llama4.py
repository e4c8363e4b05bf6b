"""Llama 4 (text): layers that turn and see a chunk, layers that do neither, experts whose input is scaled."""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, MoESpec, NormSpec, QueryScaling, RouterSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import read_rope
from jaxlm.conversion.transforms import Fused, Transposed

MLP = "model.layers.{i}.feed_forward."
KINDS = ("full_attention", "chunked_attention")


def turning_layers(c: Fields) -> tuple[bool, ...]:
    """Whether each layer has rotary positions: no_rope_layers holds 1 for those that do; empty is as if absent."""
    count, every = c.count("num_hidden_layers"), c.count("no_rope_layer_interval", 4)
    flags = c.numbers("no_rope_layers", []) or tuple(float((i + 1) % every > 0) for i in range(count))
    if len(flags) < count or not set(flags) <= {0.0, 1.0}:
        raise c.error("no_rope_layers", f"a list of {count} times 0 or 1")
    return tuple(flag > 0 for flag in flags[:count])


def attentions(c: Fields, positions: int, eps: float) -> tuple[AttentionSpec, ...]:
    turning, chunk = turning_layers(c), c.count("attention_chunk_size", 8192, null=0)
    plain = tuple(KINDS[int(turns and chunk > 0)] for turns in turning)
    kinds = c.texts("layer_types", KINDS, len(turning), plain)
    if KINDS[1] in kinds and not chunk:
        raise c.error("attention_chunk_size", "an integer of at least 1 where layers are chunked")
    growth = QueryScaling(c.number("attn_scale", 0.1), c.count("floor_scale", 8192), shift=1)
    grown, normed = c.flag("attn_temperature_tuning", True), c.flag("use_qk_norm", True)
    rope, bias = read_rope(c, positions, 500000.0, interleaved=True), c.flag("attention_bias", False)
    heads = standard.heads(c, kv_default=8, dim_default=128)
    return tuple(
        AttentionSpec(
            **heads,
            rope=rope if turns else None,
            qkv_bias=bias,
            out_bias=bias,
            chunk=chunk if kind == KINDS[1] else 0,
            qk_norm=NormSpec(eps=eps, scale=False) if turns and normed else None,
            qk_norm_after_rope=turns and normed,
            query_scaling=growth if grown and not turns else None,
        )
        for turns, kind in zip(turning, kinds, strict=True)
    )


def experts(c: Fields, activation: Any) -> MoESpec:
    expert = FFNSpec(c.count("intermediate_size"), activation)
    router = RouterSpec(scoring="sigmoid", normalize=False)
    top_k = c.count("num_experts_per_tok", 1)
    return MoESpec(c.count("num_local_experts"), top_k, expert, router, shared=expert, scale_input=True)


def translate(c: Fields) -> ModelConfig:
    positions, eps = c.count("max_position_embeddings", 131072), c.number("rms_norm_eps", 1e-5)
    attention, act = attentions(c, positions, eps), c.activation("hidden_act", "silu")
    moe, dense = experts(c, act), FFNSpec(c.count("intermediate_size_mlp"), act)
    step = c.count("interleave_moe_layer_step", 1)
    sparse = c.numbers("moe_layers", [float(i) for i in range(step - 1, len(attention), step)])

    def layer(i: int) -> LayerSpec:
        return LayerSpec(attention[i], moe if i in sparse else dense, NormSpec(eps=eps))

    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    specs = [standard.attention_of(layer) for layer in config.layers]
    turning = next((i for i, a in enumerate(specs) if a.rope), 0)
    fields = standard.describe(ModelConfig(config.vocab_size, config.hidden_size, config.layers[turning:]))
    moe = next(layer.ffn for layer in config.layers if isinstance(layer.ffn, MoESpec))
    growth = next((a.query_scaling for a in specs if a.query_scaling), None)
    for name in ("num_experts", "moe_intermediate_size", "norm_topk_prob"):
        del fields[name]
    return fields | {
        "num_hidden_layers": len(specs),
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": specs[0].qkv_bias,
        "attention_chunk_size": max(a.chunk for a in specs) or None,
        "layer_types": [KINDS[int(a.chunk > 0)] for a in specs],
        "no_rope_layers": [int(a.rope is not None) for a in specs],
        "use_qk_norm": specs[turning].qk_norm is not None,
        "attn_temperature_tuning": growth is not None,
        **({"attn_scale": growth.beta, "floor_scale": growth.original} if growth else {}),
        "intermediate_size": moe.expert.intermediate_size,
        "intermediate_size_mlp": fields.get("intermediate_size", moe.expert.intermediate_size),
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_layers": [i for i, layer in enumerate(config.layers) if isinstance(layer.ffn, MoESpec)],
    }


def gguf_fields(metadata: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """What files leave unsaid: all have the published models' settings; the one of 128 experts has no norms."""
    return {
        "attention_chunk_size": 8192,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "use_qk_norm": metadata.get("expert_count") != 128,
    }


FAMILY = Family(
    model_types=("llama4_text",),
    architectures=("Llama4ForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        *(row for row in standard.ROWS if ".mlp." not in row.sources[0]),
        *(Row(f"ffn.{name}", f"{MLP}{name}_proj.weight") for name in ("gate", "up", "down")),
        *(Row(f"ffn.shared.{name}", f"{MLP}shared_expert.{name}_proj.weight") for name in ("gate", "up", "down")),
        Row("ffn.router.weight", MLP + "router.weight"),
        Row(
            ("ffn.experts.gate", "ffn.experts.up"),
            MLP + "experts.gate_up_proj",
            Fused(axis=-1, part=Transposed()),
        ),
        Row("ffn.experts.down", MLP + "experts.down_proj", Transposed()),
    ),
    gguf=("llama4",),
    gguf_rows=gguf_rows("llama4"),
    gguf_fields=gguf_fields,
    gguf_names={
        "expert_count": "num_local_experts",
        "expert_feed_forward_length": "intermediate_size",
        "feed_forward_length": "intermediate_size_mlp",
    },
    harmless=("cache_implementation", "for_llm_compressor", "router_aux_loss_coef", "router_jitter_noise"),
    ignored=("vision_model.*", "multi_modal_projector.*"),
    prefixes=("", "language_model."),
    multimodal=("llama4",),
)
