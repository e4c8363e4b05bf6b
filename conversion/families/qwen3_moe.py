"""Qwen 3 with experts: softmax over all of them, the best few, and dense layers where the config says so."""

from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, MoESpec, NormSpec, RouterSpec
from jaxlm.conversion import standard
from jaxlm.conversion.families.qwen2 import gguf_bias
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.rope_settings import agreed, read_rope


def window(c: Fields) -> int:
    """The window of all layers, 0 for none."""
    size, used = c.count("sliding_window", 4096, null=0), c.flag("use_sliding_window", False)
    if c.count("max_window_layers", 0, least=0) and used and size:
        raise c.error("max_window_layers", "0 where use_sliding_window is true: programs differ on what it means here")
    return size if used else 0


def experts(c: Fields, activation: Any) -> MoESpec | None:
    """The experts of a layer that has them."""
    count = agreed(c, "num_experts", [c.count(n, None, least=0) for n in ("num_experts", "num_local_experts")], 128)
    expert = FFNSpec(c.count("moe_intermediate_size", 768), activation)
    router = RouterSpec(normalize=c.flag("norm_topk_prob", False))
    top_k = c.count("num_experts_per_tok", 8)
    return MoESpec(count, top_k, expert, router) if count else None


def translate(c: Fields) -> ModelConfig:
    positions, bias = c.count("max_position_embeddings", 32768), c.flag("attention_bias", False)
    norm, act = NormSpec(eps=c.number("rms_norm_eps", 1e-6)), c.activation("hidden_act", "silu")
    attention = AttentionSpec(
        **standard.heads(c, kv_default=4), rope=read_rope(c, positions), window=window(c), qkv_bias=bias, out_bias=bias,
        qk_norm=norm,
    )  # fmt: skip
    dense, sparse = FFNSpec(c.count("intermediate_size", 6144), act), experts(c, act)
    step, only = c.count("decoder_sparse_step", 1), c.numbers("mlp_only_layers", ())

    def layer(i: int) -> LayerSpec:
        chosen = sparse if sparse and i not in only and (i + 1) % step == 0 else dense
        return LayerSpec(attention, chosen, norm)

    tied = c.flag("tie_word_embeddings", False)
    return standard.model_config(c, layer, tie_embeddings=tied, max_positions=positions)


def describe(config: ModelConfig) -> dict[str, Any]:
    attention = standard.attention_of(config.layers[0])
    return standard.describe(config) | {
        "attention_bias": attention.qkv_bias,
        "use_sliding_window": attention.window > 0,
        "sliding_window": attention.window or None,
        "mlp_only_layers": [i for i, layer in enumerate(config.layers) if isinstance(layer.ffn, FFNSpec)],
        "decoder_sparse_step": 1,
    }


FAMILY = Family(
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    translate=translate,
    describe=describe,
    rows=(
        *standard.ROWS,
        *standard.QK_NORMS,
        Row("ffn.router.weight", "model.layers.{i}.mlp.gate.weight"),
        Row("ffn.experts.gate", "model.layers.{i}.mlp.experts.{e}.gate_proj.weight"),
        Row("ffn.experts.up", "model.layers.{i}.mlp.experts.{e}.up_proj.weight"),
        Row("ffn.experts.down", "model.layers.{i}.mlp.experts.{e}.down_proj.weight"),
    ),
    gguf=("qwen3moe",),
    gguf_rows=gguf_rows("qwen3moe"),
    # Whoever runs such files has all layers with experts and weights that sum to one; the files do not say.
    gguf_fields=lambda metadata, tensors: {**gguf_bias(metadata, tensors), "norm_topk_prob": True},
    harmless=("router_aux_loss_coef",),
)
