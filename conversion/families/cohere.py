"""Command R and Aya: attention and FFN side by side under one LayerNorm, neighbouring lanes turned in pairs, logits
multiplied. Command R7B and A: windows on most layers, the others without positions."""

from dataclasses import replace
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec, RopeSpec
from jaxlm.conversion import standard
from jaxlm.conversion.families.olmo2 import KINDS
from jaxlm.conversion.families.qwen2 import gguf_bias
from jaxlm.conversion.family import Family
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import describe_rope, read_rope
from jaxlm.conversion.transforms import HeadsApart

QK_NORMS = ("attn.q_norm.scale", "attn.k_norm.scale")


def translate(c: Fields, rope: RopeSpec, windows: tuple[int, ...] = (), qk_norm: NormSpec | None = None) -> ModelConfig:
    """What both have in common. windows: of layers of which only those that have one turn; () where all turn."""
    bias, heads, norm = c.flag("attention_bias", False), standard.heads(c), layer_norm(c)
    ffn = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "silu"))

    def layer(i: int) -> LayerSpec:
        window = windows[i] if windows else 0
        attention = AttentionSpec(
            **heads, rope=rope if window or not windows else None, window=window, qkv_bias=bias, out_bias=bias,
            qk_norm=qk_norm, qk_norm_over="heads" if qk_norm else "head",
        )  # fmt: skip
        return LayerSpec(attention, ffn, norm, parallel=True, shared_norm=True)

    return standard.model_config(
        c,
        layer,
        tie_embeddings=c.flag("tie_word_embeddings", True),
        max_positions=c.count("max_position_embeddings", 8192),
        logit_scale=c.number("logit_scale", 0.0625 if c.kind == "hf" else 1.0),
    )


def layer_norm(c: Fields) -> NormSpec:
    return NormSpec("layer", c.number("layer_norm_eps", 1e-5))


def cohere(c: Fields) -> ModelConfig:
    theta = 500000.0 if c.kind == "hf" else 10000.0
    rope = read_rope(c, c.count("max_position_embeddings", 8192), theta, interleaved=True)
    return translate(c, rope, qk_norm=layer_norm(c) if c.flag("use_qk_norm", False) else None)


def cohere2(c: Fields) -> ModelConfig:
    rope = read_rope(c, c.count("max_position_embeddings", 8192), interleaved=True)
    return translate(c, rope, standard.windows(c, c.count("sliding_window_pattern", 4), 4096))


def describe(config: ModelConfig) -> dict[str, Any]:
    fields, attention = standard.describe(config), standard.attention_of(config.layers[0])
    own = {"layer_norm_eps": fields.pop("rms_norm_eps"), "logit_scale": config.logit_scale}
    return fields | own | {"attention_bias": attention.qkv_bias, "use_qk_norm": attention.qk_norm is not None}


def describe_sliding(config: ModelConfig) -> dict[str, Any]:
    attentions, fields = [standard.attention_of(layer) for layer in config.layers], describe(config)
    fields.pop("use_qk_norm")
    ropes, window = [a.rope for a in attentions if a.rope], max(a.window for a in attentions)
    turning = describe_rope(ropes[0], config.max_positions, attentions[0].head_dim) if ropes else {}
    return fields | turning | {
        "sliding_window": window or 4096,
        "layer_types": [KINDS[int(a.window > 0)] for a in attentions],
    }


FAMILIES = (
    Family(
        model_types=("cohere",),
        architectures=("CohereForCausalLM",),
        translate=cohere,
        describe=describe,
        rows=(*standard.ROWS, *(replace(row, transform=HeadsApart()) for row in standard.QK_NORMS)),
        gguf=("command-r",),
        gguf_rows=gguf_rows("command-r", {name: HeadsApart() for name in QK_NORMS}),
        gguf_fields=lambda metadata, tensors: {
            **gguf_bias(metadata, tensors), "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        },
        harmless=("model_max_length",),
    ),
    Family(
        model_types=("cohere2",),
        architectures=("Cohere2ForCausalLM",),
        translate=cohere2,
        describe=describe_sliding,
        rows=standard.ROWS,
        gguf=("cohere2",),
        gguf_rows=gguf_rows("cohere2"),
        gguf_fields=gguf_bias,
        harmless=("cache_implementation", "_sliding_window_pattern"),
        # What the published configs say beside, as the model is.
        neutral={
            "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_embedding_sharing": True,
            "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": False,
        },
    ),
)  # fmt: skip
