"""Phi-1, 1.5 and 2: one norm for attention and FFN side by side, heads that turn in part, a head with a bias."""

from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec
from jaxlm.conversion import standard
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import read_rope, rotary_dims, share
from jaxlm.conversion.standard import QKV
from jaxlm.conversion.transforms import Fused

AT = "model.layers.{i}."


def translate(c: Fields) -> ModelConfig:
    positions, heads = c.count("max_position_embeddings", 2048), standard.heads(c)
    rope = read_rope(c, positions, dims=rotary_dims(c, heads["head_dim"], 0.5))
    norm = NormSpec("layer", c.number("layer_norm_eps", 1e-5), bias=True)
    qk_norm = norm if c.flag("qk_layernorm", False) else None
    attention = AttentionSpec(**heads, rope=rope, qkv_bias=True, out_bias=True, qk_norm=qk_norm)
    ffn = FFNSpec(c.count("intermediate_size"), c.activation("hidden_act", "gelu_new"), gated=False, bias=True)
    layer = LayerSpec(attention, ffn, norm, parallel=True, shared_norm=True)
    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(
        c, lambda i: layer, tie_embeddings=tied, max_positions=positions, head_bias=True
    )


def describe(config: ModelConfig) -> dict[str, Any]:
    attention = standard.attention_of(config.layers[0])
    assert attention.rope
    return standard.describe_layer_norm(config) | {
        "partial_rotary_factor": share(attention.rope.dims, attention.head_dim),
        "qk_layernorm": attention.qk_norm is not None,
    }


FAMILY = Family(
    model_types=("phi",),
    architectures=("PhiForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        Row("embed.table", "model.embed_tokens.weight"),
        *standard.linear_rows(
            {
                "final_norm": "model.final_layernorm", "lm_head": "lm_head", "attn_norm": AT + "input_layernorm",
                "attn.q": AT + "self_attn.q_proj", "attn.k": AT + "self_attn.k_proj", "attn.v": AT + "self_attn.v_proj",
                "attn.o": AT + "self_attn.dense", "attn.q_norm": AT + "self_attn.q_layernorm",
                "attn.k_norm": AT + "self_attn.k_layernorm", "ffn.up": AT + "mlp.fc1", "ffn.down": AT + "mlp.fc2",
            }
        ),
    ),
    gguf=("phi2",),
    gguf_rows=(*gguf_rows("phi2"), *standard.linear_rows({QKV: "blk.{i}.attn_qkv"}, {QKV: (Fused(), Fused())})),
    harmless=("embd_pdrop", "resid_pdrop"),
)  # fmt: skip
