"""Mistral Small 4: DeepSeek's block with softmax scores, queries that grow with their position and stacked experts."""

from typing import Any

from jaxlm.config import LatentAttentionSpec, ModelConfig, QueryScaling, RouterSpec
from jaxlm.conversion import latent
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.rope_settings import agreed, original_positions, read_rope, rope_blocks
from jaxlm.conversion.transforms import Fused


def growth(c: Fields, positions: int) -> QueryScaling | None:
    """llama_4_scaling_beta, which stands among the rotary settings; 0 is none, and so is its absence in a GGUF file."""
    blocks = rope_blocks(c)
    beta = agreed(c, "llama_4_scaling_beta", [b.number("llama_4_scaling_beta", None) for b in (c, *blocks)], None)
    if beta is None and c.kind == "hf":
        raise c.error("rope_parameters", "an object with llama_4_scaling_beta")
    lengths = [original_positions(block, c, positions) for block in blocks]
    return QueryScaling(beta, agreed(c, "original_max_position_embeddings", lengths, positions)) if beta else None


def describe_growth(fields: dict[str, Any], queries: QueryScaling | None) -> dict[str, Any]:
    """The rotary settings with what `growth` reads."""
    for name in ("rope_parameters", "rope_scaling"):
        if name in fields:
            fields[name] = fields[name] | {"llama_4_scaling_beta": queries.beta if queries else 0.0}
    return fields


def translate(c: Fields) -> ModelConfig:
    positions = c.count("max_position_embeddings", 1048576)
    rope = read_rope(c, positions, interleaved=c.flag("rope_interleave", True))
    router = RouterSpec(
        normalize=c.flag("norm_topk_prob", True),
        scale=c.number("routed_scaling_factor", 1.0),
        **latent.groups(c, 1),
        group_score="top2",
    )
    attention = latent.attention(c, rope, growth(c, positions))
    share = attention.rope_dim / (attention.nope_dim + attention.rope_dim)
    shares = [block.number("partial_rotary_factor", None) for block in (c, *rope_blocks(c))]
    if agreed(c, "partial_rotary_factor", shares, share) != share:
        raise c.error("rope_parameters", f"partial_rotary_factor {share}, the share of qk_rope_head_dim")
    return latent.translate(c, attention, router, positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    spec = config.layers[0].attention
    assert isinstance(spec, LatentAttentionSpec)
    return describe_growth(latent.describe(config), spec.query_scaling) | {"rope_interleave": spec.rope.interleaved}


FAMILY = Family(
    model_types=("mistral4",),
    architectures=("Mistral4ForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        *latent.ROWS,
        Row(("ffn.experts.gate", "ffn.experts.up"), latent.MLP + "experts.gate_up_proj", Fused(axis=1)),
        Row("ffn.experts.down", latent.MLP + "experts.down_proj"),
    ),
    harmless=latent.HARMLESS,
)
