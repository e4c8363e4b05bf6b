"""DeepSeek-V2 and V2.5: latent attention, experts by softmax, in the larger models from the best groups only."""

from typing import Any

from jaxlm.config import ModelConfig, MoESpec, RouterSpec
from jaxlm.conversion import latent, latent_gguf
from jaxlm.conversion.family import Family
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.rope_settings import read_rope

METHODS = ("greedy", "group_limited_greedy")


def router(c: Fields) -> RouterSpec:
    """A GGUF file of a model with a query latent, which is one with groups, must give them."""
    grouped = latent.groups(c, None if c.kind == "gguf" and "q_lora_rank" in c else 1)
    method = c.text("topk_method", METHODS, METHODS[int(c.kind == "gguf" and grouped["groups"] > 1)])
    spec = {"normalize": False, "scale": c.number("routed_scaling_factor", 1.0)}
    return RouterSpec(**spec, **grouped) if method == METHODS[1] else RouterSpec(**spec)


def translate(c: Fields) -> ModelConfig:
    positions = c.count("max_position_embeddings", 2048)
    attention = latent.attention(c, read_rope(c, positions, interleaved=True))
    return latent.translate(c, attention, router(c), positions, c.flag("mlp_bias", False))


def describe(config: ModelConfig) -> dict[str, Any]:
    fields = latent.describe(config)
    grouped = fields["n_group"] > 1
    shared = [layer.ffn.shared for layer in config.layers if isinstance(layer.ffn, MoESpec)]
    return fields | {"topk_method": METHODS[int(grouped)], "mlp_bias": bool(shared[0] and shared[0].bias)}


FAMILY = Family(
    model_types=("deepseek_v2",),
    architectures=("DeepseekV2ForCausalLM",),
    translate=translate,
    describe=describe,
    rows=latent.ROWS + latent.EXPERTS,
    gguf=("deepseek2",),
    gguf_rows=latent_gguf.rows("deepseek2"),
    gguf_when=lambda fields: fields.any("expert_gating_func", 1) == 1,
    gguf_fields=latent_gguf.fields,
    gguf_names=latent_gguf.NAMES,
    harmless=latent.HARMLESS,
    neutral={"expert_gating_func": "softmax", "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax"},
)
