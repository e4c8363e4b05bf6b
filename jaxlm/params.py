"""Parameters: each array declared once, with its shape, axis names and initialiser.

Matrices keep the published layout, outputs first: `[out, in]`. The tree is

    embed.table [V,D] · segments[i][j].{attn_norm, attn, ffn_norm, ffn, ...} [R, ...] · final_norm · lm_head.table [V,D]

where segments[i][j] is layer j of the unit of segment i and R its number of repeats. A tied model has no lm_head.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.config import (
    AttentionSpec,
    FFNSpec,
    LatentAttentionSpec,
    LayerInput,
    LayerSpec,
    ModelConfig,
    MoESpec,
    NormSpec,
    RouterSpec,
)

Params = dict[str, Any]
CONSTANTS = {"ones": 1.0, "halves": 0.5, "zeros": 0.0}


@dataclass(frozen=True)
class Param:
    """The declaration of one array. init: a name in `CONSTANTS`, or the standard deviation of a normal distribution."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: str | float


def declare(config: ModelConfig) -> dict[str, Any]:
    """The parameter tree of a config, with a `Param` at every leaf."""
    width = config.hidden_size
    table = Param((config.vocab_size, width), ("vocab", "embed"), 0.02)
    tree: dict[str, Any] = {
        "embed": {"table": table},
        "segments": tuple(
            tuple(_stacked(layer_params(spec, width), segment.repeat) for spec in segment.unit)
            for segment in config.segments
        ),
        "final_norm": norm_params(config.final_norm, width),
    }
    if config.positions:
        tree["embed"]["positions"] = Param((config.positions.count, width), ("positions", "embed"), 0.02)
    if config.layers[0].layer_input:
        tree["embed"] |= layer_input_tables(config.layers[0].layer_input, config)
    if config.embed_norm:
        tree["embed"]["norm"] = norm_params(config.embed_norm, width)
    head = {} if config.tie_embeddings else {"table": table}
    if config.head_bias:
        head["bias"] = Param((config.vocab_size,), ("vocab",), "zeros")
    return tree | {"lm_head": head} if head else tree


def layer_params(spec: LayerSpec, width: int) -> dict[str, Any]:
    """The declarations of one block."""
    attn, work = spec.attention, spec.ffn
    tree: dict[str, Any] = {
        "attn": latent_params(attn, width) if isinstance(attn, LatentAttentionSpec) else attention_params(attn, width),
        "ffn": moe_params(work, width) if isinstance(work, MoESpec) else ffn_params(work, width),
    }
    names = []
    if spec.pre_norm:
        names += ["attn_norm"] if spec.shared_norm else ["attn_norm", "ffn_norm"]
    if spec.post_norm:
        names += ["attn_post_norm", "ffn_post_norm"]
    tree |= {name: norm_params(spec.norm, width) for name in names}
    if spec.beside:
        norms = {name: norm_params(spec.norm, width) for name in ("norm", "post_norm", "ffn_post_norm")}
        tree["beside"] = {"experts": moe_params(spec.beside, width), **norms}
    if spec.layer_input:
        tree["input"] = layer_input_params(spec, spec.layer_input, width)
    if spec.output_scale:
        tree["output_scale"] = Param((1,), ("one",), "ones")
    return tree


def layer_input_tables(spec: LayerInput, config: ModelConfig) -> dict[str, Any]:
    """layer_table [N,L,P], layer_proj [L,P,D] and layer_norm [P]: what makes the vectors of all L layers."""
    layers, width = len(config.layers), config.hidden_size
    return {
        "layer_table": Param((spec.rows, layers, spec.width), ("vocab", "all_layers", "head_dim"), 0.02),
        "layer_proj": Param((layers, spec.width, width), ("all_layers", "head_dim", "embed"), width**-0.5),
        "layer_norm": norm_params(config.layers[0].norm, spec.width, axes=("head_dim",)),
    }


def layer_input_params(layer: LayerSpec, spec: LayerInput, width: int) -> dict[str, Any]:
    """gate [P,D], out [D,P] and the norm [D]."""
    return {
        "gate": Param((spec.width, width), ("mlp", "embed"), width**-0.5),
        "out": Param((width, spec.width), ("embed", "mlp"), spec.width**-0.5),
        "norm": norm_params(layer.norm, width),
    }


def norm_params(spec: NormSpec, *shape: int, axes: tuple[str, ...] = ("embed",)) -> dict[str, Param]:
    """scale and bias of the given shape, by default [D], as far as the norm has them."""
    tree = {"scale": Param(shape, axes, "zeros" if spec.unit_offset else "ones")} if spec.scale else {}
    return tree | {"bias": Param(shape, axes, "zeros")} if spec.bias else tree


def attention_params(spec: AttentionSpec, width: int) -> dict[str, Any]:
    """q [H,h,D], k and v [K,h,D] where the layer makes them, o [D,H,h]; biases [H,h], [K,h], [K,h], [D]."""
    heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    kv = Param((kv_heads, head_dim, width), ("kv_heads", "head_dim", "embed"), width**-0.5)
    tree: dict[str, Any] = {
        "q": Param((heads, head_dim, width), ("heads", "head_dim", "embed"), width**-0.5),
        "k": kv,
        "v": kv,
        "o": Param((width, heads, head_dim), ("embed", "heads", "head_dim"), (heads * head_dim) ** -0.5),
    }
    if spec.qkv_bias:
        tree["q_bias"] = Param((heads, head_dim), ("heads", "head_dim"), "zeros")
        tree["k_bias"] = tree["v_bias"] = Param((kv_heads, head_dim), ("kv_heads", "head_dim"), "zeros")
    if spec.out_bias:
        tree["o_bias"] = Param((width,), ("embed",), "zeros")
    if spec.sinks:
        tree["sinks"] = Param((heads,), ("heads",), "zeros")
    if spec.qk_norm:
        norms = {"q_norm": (heads, "heads"), "k_norm": (kv_heads, "kv_heads")}
        tree |= {name: qk_norm_params(spec, *size) for name, size in norms.items()}
    if spec.v_norm:
        tree["v_norm"] = norm_params(spec.v_norm, head_dim, axes=("head_dim",))
    absent = ["k", "k_bias", "k_norm", "v", "v_bias", "v_norm"] if spec.kv_from else []
    absent += ["v", "v_bias"] if spec.v_from_k else []
    return {name: leaf for name, leaf in tree.items() if leaf != {} and name not in absent}


def qk_norm_params(spec: AttentionSpec, heads: int, axis: str) -> dict[str, Param]:
    """[h] shared by all heads, or [H,h]: a weight for every lane of every head."""
    assert spec.qk_norm
    if spec.qk_norm_over == "head":
        return norm_params(spec.qk_norm, spec.head_dim, axes=("head_dim",))
    return norm_params(spec.qk_norm, heads, spec.head_dim, axes=(axis, "head_dim"))


def latent_params(spec: LatentAttentionSpec, width: int) -> dict[str, Any]:
    """q [H,h,D] or q_down [Q,D], q_norm, q_up [H,h,Q]; kv_down [C+r,D], kv_norm, k_up [H,n,C], v_up [H,v,C]; o [D,H,v].

    h = n + r: the lanes made from the latent, then the rotated ones; Q = q_rank, C = kv_rank, v = value_dim.
    """
    heads, rank, value_dim = spec.num_heads, spec.kv_rank, spec.value_dim
    head_dim, latent_dim = spec.nope_dim + spec.rope_dim, spec.kv_rank + spec.rope_dim
    q_width = spec.q_rank or width
    q = Param((heads, head_dim, q_width), ("heads", "head_dim", "q_latent" if spec.q_rank else "embed"), q_width**-0.5)
    tree: dict[str, Any] = {"q_up" if spec.q_rank else "q": q}
    if spec.q_rank:
        tree["q_down"] = Param((spec.q_rank, width), ("q_latent", "embed"), width**-0.5)
        tree["q_norm"] = norm_params(spec.norm, spec.q_rank, axes=("q_latent",))
    tree |= {
        "kv_down": Param((latent_dim, width), ("latent", "embed"), width**-0.5),
        "kv_norm": norm_params(spec.norm, rank, axes=("latent",)),
        "k_up": Param((heads, spec.nope_dim, rank), ("heads", "head_dim", "latent"), rank**-0.5),
        "v_up": Param((heads, value_dim, rank), ("heads", "head_dim", "latent"), rank**-0.5),
        "o": Param((width, heads, value_dim), ("embed", "heads", "head_dim"), (heads * value_dim) ** -0.5),
    }
    if spec.qkv_bias:
        tree["kv_down_bias"] = Param((latent_dim,), ("latent",), "zeros")
        if spec.q_rank:
            tree["q_down_bias"] = Param((spec.q_rank,), ("q_latent",), "zeros")
    if spec.out_bias:
        tree["o_bias"] = Param((width,), ("embed",), "zeros")
    return tree


def ffn_params(spec: FFNSpec, width: int) -> dict[str, Param]:
    """up and, if gated, gate [F,D]; down [D,F]; biases [F], [F], [D]; xIELU: four of [1]."""
    inner = spec.intermediate_size
    names = ("gate", "up") if spec.gated else ("up",)
    tree = {name: Param((inner, width), ("mlp", "embed"), width**-0.5) for name in names}
    tree["down"] = Param((width, inner), ("embed", "mlp"), inner**-0.5)
    if spec.bias:
        tree |= {f"{name}_bias": Param((inner,), ("mlp",), "zeros") for name in names}
        tree["down_bias"] = Param((width,), ("embed",), "zeros")
    if spec.activation == "xielu":
        tree |= {name: Param((1,), ("one",), "ones") for name in ("alpha_p", "alpha_n")}
        tree |= {"beta": Param((1,), ("one",), "halves"), "eps": Param((1,), ("one",), "zeros")}
    return tree


def moe_params(spec: MoESpec, width: int) -> dict[str, Any]:
    """router [E,D]; experts: the leaves of one FFN with a leading E axis; shared: an FFN."""
    experts = spec.num_experts
    tree: dict[str, Any] = {
        "router": router_params(spec.router, experts, width),
        "experts": _map(lambda p: _with_axis(p, experts, "experts"), ffn_params(spec.expert, width)),
    }
    if spec.shared:
        tree["shared"] = ffn_params(spec.shared, width)
    if spec.shared_gate:
        tree["shared_gate"] = Param((1, width), ("one", "embed"), width**-0.5)
    return tree


def router_params(spec: RouterSpec, experts: int, width: int) -> dict[str, Any]:
    """weight [E,D], with bias [E], correction [E], expert_scale [E] and norm [D] as the router has them."""
    tree: dict[str, Any] = {"weight": Param((experts, width), ("experts", "embed"), width**-0.5)}
    for name, init in (("bias", "zeros"), ("correction", "zeros"), ("expert_scale", "ones")):
        if getattr(spec, name):
            tree[name] = Param((experts,), ("experts",), init)
    return tree | {"norm": norm_params(spec.norm, width)} if spec.norm else tree


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Random parameters of dtype config.dtype: normal matrices, norms at one, biases at zero.

    Every leaf's key is derived from its path, so that adding a leaf does not change the others.
    """
    def draw(path: tuple[Any, ...], param: Param) -> jax.Array:
        return _draw(param, jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode())), config.dtype)

    return jax.tree_util.tree_map_with_path(draw, declare(config), is_leaf=_is_param)


def abstract_params(config: ModelConfig) -> Params:
    """The tree with `jax.ShapeDtypeStruct` leaves: shapes and dtypes, no memory."""
    return _map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.dtype(config.dtype)), declare(config))


def param_axes(config: ModelConfig) -> dict[str, Any]:
    """The tree with a tuple of logical axis names at every leaf."""
    return _map(lambda p: p.axes, declare(config))


def unstack(params: Params) -> Params:
    """The same model with a list of single layers in place of each stacked segment.

    All functions take either form. Stacked segments run as a `lax.scan`, lists as an unrolled loop, with equal results.
    """
    def split(segment: Any) -> list[Any]:
        repeat = jax.tree.leaves(segment)[0].shape[0]
        return [jax.tree.map(lambda a, i=i: a[i], segment) for i in range(repeat)]

    return {**params, "segments": tuple(split(s) for s in params["segments"])}


def _stacked(tree: Any, repeat: int) -> Any:
    return _map(lambda p: _with_axis(p, repeat, "layers"), tree)


def _with_axis(param: Param, size: int, axis: str) -> Param:
    return Param((size, *param.shape), (axis, *param.axes), param.init)


def _is_param(leaf: object) -> bool:
    return isinstance(leaf, Param)


def _map(function: Callable[[Param], Any], tree: Any) -> Any:
    return jax.tree.map(function, tree, is_leaf=_is_param)


def _draw(param: Param, key: jax.Array, dtype: str) -> jax.Array:
    if isinstance(param.init, str):
        return jnp.full(param.shape, CONSTANTS[param.init], dtype)
    return (param.init * jax.random.normal(key, param.shape, jnp.float32)).astype(dtype)
