"""What most families share: tensor names after Llama's, and the config fields that they all read.

A family uses the pieces that fit and says the rest itself.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, MoESpec
from jaxlm.conversion.family import SAME, Names, Row
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.rope_settings import describe_rope
from jaxlm.conversion.transforms import Transform

ROWS = (
    Row("embed.table", "model.embed_tokens.weight"),
    Row("final_norm.scale", "model.norm.weight"),
    Row("lm_head.table", "lm_head.weight"),
    Row("attn_norm.scale", "model.layers.{i}.input_layernorm.weight"),
    Row("attn.q", "model.layers.{i}.self_attn.q_proj.weight"),
    Row("attn.k", "model.layers.{i}.self_attn.k_proj.weight"),
    Row("attn.v", "model.layers.{i}.self_attn.v_proj.weight"),
    Row("attn.o", "model.layers.{i}.self_attn.o_proj.weight"),
    Row("attn.q_bias", "model.layers.{i}.self_attn.q_proj.bias"),
    Row("attn.k_bias", "model.layers.{i}.self_attn.k_proj.bias"),
    Row("attn.v_bias", "model.layers.{i}.self_attn.v_proj.bias"),
    Row("attn.o_bias", "model.layers.{i}.self_attn.o_proj.bias"),
    Row("ffn_norm.scale", "model.layers.{i}.post_attention_layernorm.weight"),
    Row("ffn.gate", "model.layers.{i}.mlp.gate_proj.weight"),
    Row("ffn.up", "model.layers.{i}.mlp.up_proj.weight"),
    Row("ffn.down", "model.layers.{i}.mlp.down_proj.weight"),
    Row("ffn.gate_bias", "model.layers.{i}.mlp.gate_proj.bias"),
    Row("ffn.up_bias", "model.layers.{i}.mlp.up_proj.bias"),
    Row("ffn.down_bias", "model.layers.{i}.mlp.down_proj.bias"),
)

# Four norms a layer: what Llama's post_attention_layernorm names is here the norm after attention.
FOUR_NORMS = (
    *(row for row in ROWS if row.target != "ffn_norm.scale"),
    Row("attn_post_norm.scale", "model.layers.{i}.post_attention_layernorm.weight"),
    Row("ffn_norm.scale", "model.layers.{i}.pre_feedforward_layernorm.weight"),
    Row("ffn_post_norm.scale", "model.layers.{i}.post_feedforward_layernorm.weight"),
)
QK_NORMS = (
    Row("attn.q_norm.scale", "model.layers.{i}.self_attn.q_norm.weight"),
    Row("attn.k_norm.scale", "model.layers.{i}.self_attn.k_norm.weight"),
)

QKV = ("attn.q", "attn.k", "attn.v")


def linear_rows(
    names: Mapping[Names, str], transforms: Mapping[Names, tuple[Transform, Transform]] | None = None, **rest: Any
) -> tuple[Row, ...]:
    """Two rows for each place, its weight and its bias: a target (or several in one) -> the name before the ending.

    transforms: target -> how its weight and its bias are stored; rest: other fields of `Row`. Norms go by "attn_norm",
    the head by "lm_head".
    """
    found = []
    for place, source in names.items():
        targets = (place,) if isinstance(place, str) else place
        how = (transforms or {}).get(place, (SAME, SAME))
        weights, biases = zip(*(_weight_and_bias(target) for target in targets), strict=True)
        found += [Row(weights, f"{source}.weight", how[0], **rest), Row(biases, f"{source}.bias", how[1], **rest)]
    return tuple(found)


def _weight_and_bias(target: str) -> tuple[str, str]:
    if target == "lm_head":
        return "lm_head.table", "lm_head.bias"
    return (f"{target}.scale", f"{target}.bias") if target.endswith("norm") else (target, f"{target}_bias")


def model_config(c: Fields, layer: Callable[[int], LayerSpec], **rest: Any) -> ModelConfig:
    """The ModelConfig of num_hidden_layers times `layer(i)`; `rest` gives or overrides its other fields."""
    layers = tuple(layer(i) for i in range(c.count("num_hidden_layers", least=1)))
    common = {
        "vocab_size": c.count("vocab_size"),
        "hidden_size": c.count("hidden_size"),
        "final_norm": layers[0].norm,
    }
    return ModelConfig(layers=layers, **{**common, **rest})


def heads(c: Fields, kv_default: int | None = None, dim_default: int | None = None) -> dict[str, Any]:
    """num_heads, num_kv_heads and head_dim.

    Where absent, num_kv_heads is kv_default, else num_heads, and head_dim is dim_default, else hidden_size / num_heads;
    the defaults are those of a config.json, which a GGUF file does not share.
    """
    if c.kind != "hf":
        kv_default = dim_default = None
    count = c.count("num_attention_heads")
    width = c.count("hidden_size")
    if "head_dim" not in c and dim_default is None and width % count:
        raise c.error("num_attention_heads", f"a divisor of hidden_size = {width}, where head_dim is absent")
    return {
        "num_heads": count,
        "num_kv_heads": c.count("num_key_value_heads", kv_default or count, null=count),
        "head_dim": c.count("head_dim", dim_default or width // count),
    }


def windows(c: Fields, period: int, default: int) -> tuple[int, ...]:
    """Each layer's window, 0 for none: layers slide as layer_types says, where absent all but every `period`-th."""
    count, kinds = c.count("num_hidden_layers"), ("full_attention", "sliding_attention")
    plain = tuple(kinds[int((i + 1) % period > 0)] for i in range(count))
    slides = [kind == kinds[1] for kind in c.texts("layer_types", kinds, count, plain)]
    window = c.count("sliding_window", default, null=0)
    if any(slides) and not window:
        raise c.error("sliding_window", "an integer of at least 1 where layers slide")
    return tuple(window if sliding else 0 for sliding in slides)


def describe(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that families with Llama's field names share; layers are taken to be like the first."""
    layer = config.layers[0]
    attention, ffn = attention_of(layer), layer.ffn.expert if isinstance(layer.ffn, MoESpec) else layer.ffn
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(ffn.activation, ffn.activation),
        "rms_norm_eps": layer.norm.eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if attention.rope:
        fields |= describe_rope(attention.rope, config.max_positions, attention.head_dim)
    return fields | describe_ffns(config)


def describe_ffns(config: ModelConfig) -> dict[str, Any]:
    """The sizes of the first dense FFN and of the first experts, as far as there are any."""
    dense = [layer.ffn for layer in config.layers if isinstance(layer.ffn, FFNSpec)]
    sparse = [layer.ffn for layer in config.layers if isinstance(layer.ffn, MoESpec)]
    fields: dict[str, Any] = {"intermediate_size": dense[0].intermediate_size} if dense else {}
    if sparse:
        fields |= {
            "num_experts": sparse[0].num_experts,
            "num_experts_per_tok": sparse[0].top_k,
            "moe_intermediate_size": sparse[0].expert.intermediate_size,
            "norm_topk_prob": sparse[0].router.normalize,
        }
    return fields


def describe_layer_norm(config: ModelConfig, *absent: str) -> dict[str, Any]:
    """`describe` for families that say layer_norm_eps and lack the fields `absent`."""
    fields = describe(config)
    fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
    return {name: value for name, value in fields.items() if name not in absent}


def alibi_slopes(heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """2 ** (-max_bias * i / n) for i = 1 to n, the largest power of two up to `heads`; heads beyond n take every second
    slope of 2n heads (Press et al. 2021)."""
    whole = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-max_bias * i / whole) for i in range(1, whole + 1)]
    more = [2.0 ** (-max_bias * i / (2 * whole)) for i in range(1, 2 * whole, 2)]
    return tuple([*first, *more][:heads])


def attention_of(layer: LayerSpec) -> AttentionSpec:
    """The layer's attention, which is of the common kind in the families that call this."""
    assert isinstance(layer.attention, AttentionSpec)
    return layer.attention


def ffn_of(layer: LayerSpec) -> FFNSpec:
    """The layer's dense FFN."""
    assert isinstance(layer.ffn, FFNSpec)
    return layer.ffn
