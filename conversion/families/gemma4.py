"""Gemma 4 (text): wider full layers with few key heads, keys and values shared by the last layers, vectors per layer,
experts beside the MLP."""

from collections.abc import Iterable
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerInput, LayerSpec, ModelConfig, MoESpec, NormSpec, RouterSpec
from jaxlm.conversion import standard
from jaxlm.conversion.families.gemma import cap
from jaxlm.conversion.family import Family, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.rope_settings import read_rope, rotary_fraction
from jaxlm.conversion.transforms import Fused

KINDS = ("full_attention", "sliding_attention")


def translate(c: Fields) -> ModelConfig:
    positions, width = c.count("max_position_embeddings", 131072), c.count("hidden_size", 2304)
    norm = NormSpec(eps=c.number("rms_norm_eps", 1e-6))
    windows = standard.windows(c, 6, default=512)
    windows = (*windows[:-1], 0)  # Whatever layer_types says of it, the last layer is full.
    sharing = labels(c, windows)
    table = c.count("vocab_size_per_layer_input", 262144)
    vector = c.count("hidden_size_per_layer_input", 256, null=0, least=0)
    activation = c.activation("hidden_activation", "gelu_pytorch_tanh")
    common = {
        "norm": norm,
        "post_norm": True,
        "beside": experts(c, activation, norm),
        "layer_input": LayerInput(vector, table, activation) if vector else None,
        "output_scale": True,
    }
    inner, double = c.count("intermediate_size", 9216), c.flag("use_double_wide_mlp", False)
    attention = attentions(c, positions, norm)

    def layer(i: int) -> LayerSpec:
        wide = 2 if double and "kv_from" in sharing[i] else 1
        return LayerSpec(attention(i, windows[i], sharing[i]), FFNSpec(wide * inner, activation), **common)

    return ModelConfig(
        vocab_size=c.count("vocab_size", 262144),
        hidden_size=width,
        layers=tuple(layer(i) for i in range(len(windows))),
        final_norm=norm,
        tie_embeddings=c.flag("tie_word_embeddings", True),
        max_positions=positions,
        embed_scale=width**0.5,
        logit_softcap=cap(c, "final_logit_softcapping", 0.0),
    )


def labels(c: Fields, windows: tuple[int, ...]) -> list[dict[str, str]]:
    """kv_keep and kv_from of each layer: the last ones use what the last layer of their kind before them keeps."""
    shared = c.count("num_kv_shared_layers", 0, least=0)
    own = windows[: max(len(windows) - shared, 0)]
    if shared and (not own or {w > 0 for w in windows} != {w > 0 for w in own}):
        raise c.error("num_kv_shared_layers", "a number that leaves a layer of each kind its keys and values")
    last = {len(own) - 1 - own[::-1].index(w): w for w in set(own)} if shared else {}
    kept = [{"kv_keep": KINDS[w > 0]} if i in last else {} for i, w in enumerate(own)]
    return kept + [{"kv_from": KINDS[w > 0]} for w in windows[len(own) :]]


def attentions(c: Fields, positions: int, norm: NormSpec) -> Any:
    """(layer, window, labels) -> AttentionSpec. Full layers have widths of their own, in either spelling."""
    heads, kv_heads = c.count("num_attention_heads", 8), c.count("num_key_value_heads", 4)
    head_dim, v_norm = c.count("head_dim", 256), NormSpec(eps=norm.eps, scale=False)
    full_dim, equal = c.count("global_head_dim", 512), c.flag("attention_k_eq_v", False)
    full_kv = c.count("num_global_key_value_heads", kv_heads)
    per_layer, bias = c.block("per_layer_config"), c.flag("attention_bias", False)
    local = read_rope(c, positions, 1e4, KINDS[1])
    outer = c.block("rope_parameters")
    wide = outer.block(KINDS[0]) if outer else None
    partial = wide is None or wide.any("rope_type", None) == "proportional"
    fraction = rotary_fraction(c, 1.0 if wide else 0.25, KINDS[0]) if partial else 1.0

    def attention(i: int, window: int, sharing: dict[str, str]) -> AttentionSpec:
        full = window == 0 and per_layer is None
        own = per_layer.block(str(i)) if per_layer else None
        width = own.count("head_dim", head_dim) if own else full_dim if full else head_dim
        kv = own.count("num_key_value_heads", kv_heads) if own else full_kv if full and equal else kv_heads
        turning = int(fraction * width // 2)
        if not turning:
            raise c.error("rope_parameters", f"a partial_rotary_factor that turns a pair of {width} lanes")
        rope = local if window else read_rope(c, positions, 1e6, KINDS[0], angles=turning % (width // 2))
        return AttentionSpec(
            heads, kv, width, rope, bias, bias, window, scale=1.0, qk_norm=norm, v_norm=v_norm,
            v_from_k=equal and not window, **sharing,
        )  # fmt: skip

    return attention


def experts(c: Fields, activation: Any, norm: NormSpec) -> MoESpec | None:
    sizes = [c.count(name, 1) for name in ("num_experts", "top_k_experts", "moe_intermediate_size")]
    router = RouterSpec(expert_scale=True, norm=norm)
    return MoESpec(*sizes[:2], FFNSpec(sizes[2], activation), router) if c.flag("enable_moe_block", False) else None


def unused(config: ModelConfig) -> Iterable[str]:
    """Published files hold weights that layers with shared keys and values never use."""
    for i, layer in enumerate(config.layers):
        if layer.attention.kv_from:
            for name in ("k_proj", "v_proj", "k_norm", "v_norm"):
                yield f"*.layers.{i}.self_attn.{name}.*"


AT = "model.layers.{i}."
BESIDE = (
    Row("beside.ffn_post_norm.scale", AT + "post_feedforward_layernorm_1.weight"),
    Row("beside.norm.scale", AT + "pre_feedforward_layernorm_2.weight"),
    Row("beside.post_norm.scale", AT + "post_feedforward_layernorm_2.weight"),
    Row("beside.experts.router.weight", AT + "router.proj.weight"),
    Row("beside.experts.router.norm.scale", AT + "router.scale"),
    Row("beside.experts.router.expert_scale", AT + "router.per_expert_scale"),
    Row(("beside.experts.experts.gate", "beside.experts.experts.up"), AT + "experts.gate_up_proj", Fused(axis=1)),
    Row("beside.experts.experts.down", AT + "experts.down_proj"),
)
PER_LAYER = (
    Row("embed.layer_table", "model.embed_tokens_per_layer.weight"),
    Row("embed.layer_proj", "model.per_layer_model_projection.weight"),
    Row("embed.layer_norm.scale", "model.per_layer_projection_norm.weight"),
    Row("input.gate", AT + "per_layer_input_gate.weight"),
    Row("input.out", AT + "per_layer_projection.weight"),
    Row("input.norm.scale", AT + "post_per_layer_input_norm.weight"),
    Row("output_scale", AT + "layer_scalar"),
)
TOWERS = ("vision_tower.*", "audio_tower.*", "embed_vision.*", "embed_audio.*")
FAMILY = Family(
    model_types=("gemma4_text",),
    architectures=("Gemma4ForCausalLM",),
    translate=translate,
    rows=(*standard.FOUR_NORMS, *standard.QK_NORMS, *BESIDE, *PER_LAYER),
    neutral={"use_bidirectional_attention": "vision"},
    prefixes=("model.", "model.language_model."),
    multimodal=("gemma4",),
    ignored=tuple(f"model.{name}" for name in TOWERS),
    unused=unused,
)
