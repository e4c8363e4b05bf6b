"""Phi-3, Phi-3.5 and Phi-4 (text): Llama's block with fused projections, LongRoPE and partly rotated heads."""

from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, LongRopeScaling, ModelConfig, NormSpec, RopeSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import read_rope, rotary_fraction
from jaxlm.conversion.transforms import Fused

QKV, GATE_UP = ("attn.q", "attn.k", "attn.v"), ("ffn.gate", "ffn.up")
ORIGINAL = "original_max_position_embeddings"


def translate(c: Fields) -> ModelConfig:
    positions = c.count("max_position_embeddings", 4096)
    heads = standard.heads(c)
    dims = int(heads["head_dim"] * rotary_fraction(c))
    window = c.count("sliding_window", 0, null=0, least=0)
    attention = AttentionSpec(**heads, rope=read_turning(c, positions, dims), window=window)
    ffn = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "silu"))
    layer = LayerSpec(attention, ffn, NormSpec(eps=c.number("rms_norm_eps", 1e-5)))
    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions)


def read_turning(c: Fields, positions: int, dims: int) -> RopeSpec:
    """The length up to which the short divisors hold must stand at the top level, which alone counts."""
    original = c.count("rope.scaling.original_context_length" if c.kind == "gguf" else ORIGINAL, 4096)
    if "rope_factors_long" in c:
        short, long = c.numbers("rope_factors_short"), c.numbers("rope_factors_long")
        scaling = LongRopeScaling(short, long, original, c.number("rope.scaling.attn_factor", 1.0))
        return RopeSpec(c.number("rope_theta", 10000.0), scaling, dims)
    spec = read_rope(c, positions, dims=dims)
    if spec.scaling and ORIGINAL not in c:
        raise c.error(ORIGINAL, "an integer where rope_scaling is longrope")
    return spec


def describe(config: ModelConfig) -> dict[str, Any]:
    attention = standard.attention_of(config.layers[0])
    scaling = attention.rope.scaling if attention.rope else None
    original = scaling.original_max_positions if isinstance(scaling, LongRopeScaling) else config.max_positions
    return standard.describe(config) | {ORIGINAL: original, "sliding_window": attention.window or None}


FAMILY = Family(
    model_types=("phi3",),
    architectures=("Phi3ForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        *(row for row in standard.ROWS if row.target not in QKV + GATE_UP),
        Row(QKV, "model.layers.{i}.self_attn.qkv_proj.weight", Fused()),
        Row(GATE_UP, "model.layers.{i}.mlp.gate_up_proj.weight", Fused()),
    ),
    gguf=("phi3",),
    gguf_rows=(
        *(row for row in gguf_rows("phi3") if row.target != "ffn.up"),
        Row(QKV, "blk.{i}.attn_qkv.weight", Fused()),
        Row(GATE_UP, "blk.{i}.ffn_up.weight", Fused()),
    ),
    harmless=("embd_pdrop", "resid_pdrop"),
    neutral={
        "attention_bias": False, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
    },
)  # fmt: skip
