"""EXAONE 4: norms after attention and FFN only, queries and keys normalised per head; where some layers have windows,
the others do not turn."""

from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.families.olmo2 import KINDS, ROWS, gguf_kinds
from jaxlm.conversion.family import Family
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import describe_rope, read_rope


def windows(c: Fields) -> tuple[int, ...]:
    """Each layer's window, 0 for none."""
    period, fallback = c.any("sliding_window_pattern", 4), 4096 if c.kind == "hf" else 0
    if not c.count("sliding_window", fallback, null=0):  # Nothing slides: standard.windows refuses layers that would.
        period = 1
    elif type(period) is not int and "layer_types" not in c:
        raise c.error("sliding_window_pattern", "an integer where layer_types is absent")
    return standard.windows(c, period if type(period) is int and period > 0 else 4, fallback)


def translate(c: Fields) -> ModelConfig:
    positions, norm = c.count("max_position_embeddings", 2048), NormSpec(eps=c.number("rms_norm_eps", 1e-5))
    heads, rope, sizes = standard.heads(c, kv_default=32), read_rope(c, positions), windows(c)
    all_turn = not c.count("sliding_window", 4096 if c.kind == "hf" else 0, null=0)
    ffn = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "silu"))

    def layer(i: int) -> LayerSpec:
        turn = rope if sizes[i] or all_turn else None
        attention = AttentionSpec(**heads, rope=turn, window=sizes[i], qk_norm=norm)
        return LayerSpec(attention, ffn, norm, pre_norm=False, post_norm=True)

    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    attentions = [standard.attention_of(layer) for layer in config.layers]
    ropes, window = [a.rope for a in attentions if a.rope], max(a.window for a in attentions)
    turning = describe_rope(ropes[0], config.max_positions, attentions[0].head_dim) if ropes else {}
    return standard.describe(config) | turning | {
        "sliding_window": window or (None if ropes else 4096),
        "layer_types": [KINDS[int(a.window > 0)] for a in attentions],
    }


FAMILY = Family(
    model_types=("exaone4",),
    architectures=("Exaone4ForCausalLM",),
    translate=translate,
    describe=describe,
    rows=ROWS,
    gguf=("exaone4",),
    gguf_rows=gguf_rows("exaone4"),
    gguf_fields=gguf_kinds,
    gguf_names={"attention.sliding_window_pattern": "layer_types"},
)
