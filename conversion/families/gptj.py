"""GPT-J: neighbouring lanes turn, one norm for attention and FFN side by side, biases in the FFN and the head only."""

from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec, RopeSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields

AT = "transformer.h.{i}."


def translate(c: Fields) -> ModelConfig:
    positions, width = c.count("max_position_embeddings", 2048), c.count("hidden_size")
    dims = c.count("rotary_dim", 64, null=0)
    if dims < 2:
        raise c.error("rotary_dim", "an even number of at least 2")
    attention = AttentionSpec(**standard.heads(c), rope=RopeSpec(10000.0, dims=dims, interleaved=True))
    inner = c.count("intermediate_size", 4 * width, null=4 * width)
    ffn = FFNSpec(inner, c.activation("hidden_act", "gelu_new"), gated=False, bias=True)
    norm = NormSpec("layer", c.number("layer_norm_eps", 1e-5), bias=True)
    layer = LayerSpec(attention, ffn, norm, parallel=True, shared_norm=True)
    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, lambda i: layer, tie_embeddings=tied, max_positions=positions, head_bias=True)


def describe(config: ModelConfig) -> dict[str, Any]:
    rope = standard.attention_of(config.layers[0]).rope
    assert rope
    absent = ("num_key_value_heads", "head_dim", "rope_theta", "rope_parameters", "partial_rotary_factor")
    return standard.describe_layer_norm(config, *absent) | {"rotary_dim": rope.dims}


# Readers of GGUF files do not serve this architecture, though the format has a name for it.
FAMILY = Family(
    model_types=("gptj",),
    architectures=("GPTJForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        Row("embed.table", "transformer.wte.weight"),
        *standard.linear_rows({"lm_head": "lm_head"}),
        *standard.linear_rows(
            {
                "final_norm": "transformer.ln_f", "attn_norm": AT + "ln_1", "attn.q": AT + "attn.q_proj",
                "attn.k": AT + "attn.k_proj", "attn.v": AT + "attn.v_proj", "attn.o": AT + "attn.out_proj",
                "ffn.up": AT + "mlp.fc_in", "ffn.down": AT + "mlp.fc_out",
            }
        ),
    ),
    aliases={
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings", "n_inner": "intermediate_size",
        "activation_function": "hidden_act", "layer_norm_epsilon": "layer_norm_eps",
    },
    harmless=(
        "attn_pdrop", "embd_pdrop", "gradient_checkpointing", "n_ctx", "resid_pdrop", "summary_activation",
        "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    ),
    neutral={"rotary": True, "scale_attn_weights": True},
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)  # fmt: skip
