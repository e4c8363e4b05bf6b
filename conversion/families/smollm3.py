"""SmolLM3: Llama without rotation on every fourth layer."""

from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.families.llama import gguf_fields
from jaxlm.conversion.family import Family
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import describe_rope, read_rope
from jaxlm.conversion.transforms import PairedRows

KINDS = ("full_attention", "sliding_attention")


def turning(c: Fields) -> tuple[bool, ...]:
    """Whether each layer rotates: where no_rope_layers holds 1, where absent all but every so many-th."""
    count, step = c.count("num_hidden_layers"), c.count("no_rope_layer_interval", 4)
    flags = c.numbers("no_rope_layers", tuple(float((i + 1) % step > 0) for i in range(count)))
    if len(flags) < count or set(flags) - {0.0, 1.0}:
        raise c.error("no_rope_layers", f"a list of at least {count} of: 0, 1")
    return tuple(flag > 0 for flag in flags[:count])


def windows(c: Fields, turns: tuple[bool, ...]) -> tuple[int, ...]:
    """Each layer's window, 0 for none: with use_sliding_window, layers that layer_types names, else unrotated ones."""
    window = c.count("sliding_window", 0, null=0) if c.flag("use_sliding_window", False) else 0
    c.any("sliding_window", None)
    kinds = c.texts("layer_types", KINDS, len(turns), tuple(KINDS[int(window > 0 and not turn)] for turn in turns))
    if KINDS[1] in kinds and not window:
        raise c.error("layer_types", "full_attention alone unless use_sliding_window is true and sliding_window given")
    return tuple(window if kind == KINDS[1] else 0 for kind in kinds)


def translate(c: Fields) -> ModelConfig:
    positions, bias = c.count("max_position_embeddings", 32768), c.flag("attention_bias", False)
    rope, heads, turns = read_rope(c, positions, 2e6 if c.kind == "hf" else 1e4), standard.heads(c, 4), turning(c)
    sizes, norm = windows(c, turns), NormSpec(eps=c.number("rms_norm_eps", 1e-6))
    ffn = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "silu"), bias=c.flag("mlp_bias", False))

    def layer(i: int) -> LayerSpec:
        turn = rope if turns[i] else None
        return LayerSpec(AttentionSpec(**heads, rope=turn, window=sizes[i], qkv_bias=bias, out_bias=bias), ffn, norm)

    tied = c.flag("tie_word_embeddings", True)
    return standard.model_config(c, layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    attentions = [standard.attention_of(layer) for layer in config.layers]
    window, ropes = max(a.window for a in attentions), [a.rope for a in attentions if a.rope]
    head_dim = attentions[0].head_dim
    return standard.describe(config) | (describe_rope(ropes[0], config.max_positions, head_dim) if ropes else {}) | {
        "pad_token_id": None,  # The published default may lie outside the vocabulary.
        "attention_bias": attentions[0].qkv_bias,
        "mlp_bias": standard.ffn_of(config.layers[0]).bias,
        "no_rope_layers": [int(a.rope is not None) for a in attentions],
        "layer_types": [KINDS[int(a.window > 0)] for a in attentions],
        "use_sliding_window": window > 0,
        "sliding_window": window or None,
    }  # fmt: skip


FAMILY = Family(
    model_types=("smollm3",),
    architectures=("SmolLM3ForCausalLM",),
    translate=translate,
    describe=describe,
    rows=standard.ROWS,
    gguf=("smollm3",),
    gguf_rows=gguf_rows("smollm3", {t: PairedRows() for t in ("attn.q", "attn.k", "attn.q_bias", "attn.k_bias")}),
    gguf_fields=gguf_fields,
    harmless=("pretraining_tp",),
)
