"""OLMo 2: norms after attention and FFN only, queries and keys normalised over all heads. OLMo 3: windows on most
layers, and the rotary scaling on the others alone."""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec, RopeSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import describe_scaling, read_local_rope, read_rope

KINDS = ("full_attention", "sliding_attention")


def translate(c: Fields, ropes: tuple[RopeSpec, RopeSpec], windows: tuple[int, ...]) -> ModelConfig:
    """What both have in common. ropes: of full layers and of sliding ones; windows: of each layer, 0 for none."""
    bias, norm = c.flag("attention_bias", False), NormSpec(eps=c.number("rms_norm_eps", 1e-5))
    ffn, heads = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "silu")), standard.heads(c)

    def layer(i: int) -> LayerSpec:
        attention = AttentionSpec(
            **heads, rope=ropes[int(windows[i] > 0)], window=windows[i], qkv_bias=bias, out_bias=bias, qk_norm=norm,
            qk_norm_over="full",
        )  # fmt: skip
        return LayerSpec(attention, ffn, norm, pre_norm=False, post_norm=True)

    tied, positions = c.flag("tie_word_embeddings", False), c.count("max_position_embeddings", 2048)
    return standard.model_config(c, layer, tie_embeddings=tied, max_positions=positions)


def olmo2(c: Fields) -> ModelConfig:
    rope = read_rope(c, c.count("max_position_embeddings", 2048))
    return translate(c, (rope, rope), (0,) * c.count("num_hidden_layers"))


def olmo3(c: Fields) -> ModelConfig:
    positions, nested = c.count("max_position_embeddings", 2048), c.block("rope_parameters")
    if nested and KINDS[0] not in nested:
        raise c.error("rope_parameters", f"an object for each of {' and '.join(KINDS)}")
    full = read_rope(c, positions, 500000.0, KINDS[0])
    sliding = read_local_rope(c, positions, 500000.0, KINDS[1], "rope_theta")
    return translate(c, (full, sliding), standard.windows(c, 4, 4096))


def describe(config: ModelConfig) -> dict[str, Any]:
    return standard.describe(config) | {"attention_bias": standard.attention_of(config.layers[0]).qkv_bias}


def describe_olmo3(config: ModelConfig) -> dict[str, Any]:
    attentions = [standard.attention_of(layer) for layer in config.layers]
    slides = [attention.window > 0 for attention in attentions]
    ropes = dict(zip(slides, [attention.rope for attention in attentions], strict=True))
    blocks = {
        KINDS[int(slide)]: {"rope_theta": rope.theta, **describe_scaling(rope.scaling, config.max_positions)}
        for slide, rope in ropes.items()
        if rope
    }
    fields = {name: value for name, value in describe(config).items() if not name.startswith("rope_")}
    full = blocks.get(KINDS[0]) or blocks[KINDS[1]]
    # Older programs know one theta for all layers, and scaling as that of full layers.
    older = {"rope_theta": full["rope_theta"]} if len({b["rope_theta"] for b in blocks.values()}) == 1 else {}
    older |= {"rope_scaling": {k: v for k, v in full.items() if k != "rope_theta"}} if "factor" in full else {}
    return fields | older | {
        "rope_parameters": {KINDS[0]: full, **blocks},
        "sliding_window": max(attention.window for attention in attentions) or 4096,
        "layer_types": [KINDS[int(slide)] for slide in slides],
    }


def gguf_kinds(metadata: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """layer_types from the list that says which layers slide."""
    pattern = metadata.get("attention.sliding_window_pattern")
    flags = isinstance(pattern, list) and all(isinstance(slide, bool) for slide in pattern)
    return {"layer_types": [KINDS[int(slide)] for slide in pattern]} if flags and pattern else {}


ROWS = (
    *(row for row in standard.FOUR_NORMS if row.target not in ("attn_norm.scale", "ffn_norm.scale")),
    *standard.QK_NORMS,
)
FAMILIES = (
    Family(
        model_types=("olmo2",),
        architectures=("Olmo2ForCausalLM",),
        translate=olmo2,
        describe=describe,
        rows=ROWS,
        gguf=("olmo2",),
        gguf_rows=gguf_rows("olmo2"),
        gguf_when=lambda fields: "sliding_window" not in fields,
    ),
    Family(
        model_types=("olmo3",),
        architectures=("Olmo3ForCausalLM",),
        translate=olmo3,
        describe=describe_olmo3,
        rows=ROWS,
        gguf=("olmo2",),
        gguf_rows=gguf_rows("olmo2"),
        gguf_when=lambda fields: "sliding_window" in fields,
        gguf_fields=gguf_kinds,
        gguf_names={
            "attention.sliding_window_pattern": "layer_types",
            # Converters copied the config's attention_factor, first under the one name and then under the other.
            "rope.scaling.attn_factor": "attention_factor",
            "rope.scaling.yarn_attn_factor": "attention_factor",
        },
    ),
)
