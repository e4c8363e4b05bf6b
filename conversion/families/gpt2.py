"""GPT-2: learned positions, LayerNorm, biases everywhere, matrices stored inputs first, one for q, k and v."""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, LearnedPositions, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Names, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.standard import QKV
from jaxlm.conversion.transforms import Fused, Same, Transform, Transposed

AT = "transformer.h.{i}."
TRANSPOSED = (Transposed(), Same())
STORED: Mapping[Names, tuple[Transform, Transform]] = {
    QKV: (Fused(axis=-1, part=Transposed()), Fused()),
    "attn.o": TRANSPOSED,
    "ffn.up": TRANSPOSED,
    "ffn.down": TRANSPOSED,
}


def translate(c: Fields) -> ModelConfig:
    positions, width, heads = c.count("max_position_embeddings", 1024), c.count("hidden_size"), standard.heads(c)
    scale = heads["head_dim"] ** -0.5 if c.flag("scale_attn_weights", True) else 1.0
    by_layer = c.flag("scale_attn_by_inverse_layer_idx", False)
    inner = c.count("intermediate_size", 4 * width, null=4 * width)
    ffn = FFNSpec(inner, c.activation("hidden_act", "gelu_new"), gated=False, bias=True)
    norm = NormSpec("layer", c.number("layer_norm_eps", 1e-5), bias=True)

    def layer(i: int) -> LayerSpec:
        own = scale / (i + 1) if by_layer else scale
        return LayerSpec(AttentionSpec(**heads, rope=None, qkv_bias=True, out_bias=True, scale=own), ffn, norm)

    return standard.model_config(
        c, layer, tie_embeddings=c.flag("tie_word_embeddings", True), max_positions=positions,
        positions=LearnedPositions(positions),
    )  # fmt: skip


def describe(config: ModelConfig) -> dict[str, Any]:
    scales = [standard.attention_of(layer).softmax_scale for layer in config.layers]
    return standard.describe_layer_norm(config, "num_key_value_heads", "head_dim") | {
        "scale_attn_weights": scales[0] != 1.0,
        "scale_attn_by_inverse_layer_idx": scales[-1] != scales[0],
    }


FAMILY = Family(
    model_types=("gpt2",),
    architectures=("GPT2LMHeadModel",),
    translate=translate,
    describe=describe,
    rows=(
        Row("embed.table", "transformer.wte.weight"),
        Row("embed.positions", "transformer.wpe.weight"),
        *standard.linear_rows({"final_norm": "transformer.ln_f", "lm_head": "lm_head"}),
        *standard.linear_rows(
            {
                "attn_norm": AT + "ln_1", QKV: AT + "attn.c_attn", "attn.o": AT + "attn.c_proj",
                "ffn_norm": AT + "ln_2", "ffn.up": AT + "mlp.c_fc", "ffn.down": AT + "mlp.c_proj",
            },
            STORED,
        ),
    ),
    gguf=("gpt2",),
    gguf_rows=(*gguf_rows("gpt2"), *standard.linear_rows({QKV: "blk.{i}.attn_qkv"}, {QKV: (Fused(), Fused())})),
    aliases={
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings", "n_inner": "intermediate_size",
        "activation_function": "hidden_act", "layer_norm_epsilon": "layer_norm_eps",
    },
    harmless=(
        "attn_pdrop", "embd_pdrop", "gradient_checkpointing", "n_ctx", "reorder_and_upcast_attn", "resid_pdrop",
        "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    ),
    ignored=("*.attn.bias", "*.attn.masked_bias"),
    prefixes=("transformer.", ""),
)  # fmt: skip
