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

from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec

Params = dict[str, Any]


@dataclass(frozen=True)
class Param:
    """The declaration of one array. init: "ones", "zeros", or the standard deviation of a normal distribution."""

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
    if not config.tie_embeddings:
        tree["lm_head"] = {"table": table}
    return tree


def layer_params(spec: LayerSpec, width: int) -> dict[str, Any]:
    """The declarations of one block."""
    tree: dict[str, Any] = {"attn": attention_params(spec.attention, width), "ffn": ffn_params(spec.ffn, width)}
    if spec.pre_norm:
        tree |= {"attn_norm": norm_params(spec.norm, width), "ffn_norm": norm_params(spec.norm, width)}
    if spec.post_norm:
        tree |= {"attn_post_norm": norm_params(spec.norm, width), "ffn_post_norm": norm_params(spec.norm, width)}
    return tree


def norm_params(spec: NormSpec, width: int) -> dict[str, Param]:
    tree = {"scale": Param((width,), ("embed",), "ones")}
    return tree | {"bias": Param((width,), ("embed",), "zeros")} if spec.bias else tree


def attention_params(spec: AttentionSpec, width: int) -> dict[str, Param]:
    """q [H,h,D], k and v [K,h,D], o [D,H,h]; biases [H,h], [K,h], [K,h], [D]."""
    heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    kv = Param((kv_heads, head_dim, width), ("kv_heads", "head_dim", "embed"), width**-0.5)
    tree = {
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
    return tree


def ffn_params(spec: FFNSpec, width: int) -> dict[str, Param]:
    """up and, if gated, gate [F,D]; down [D,F]; biases [F], [F], [D]."""
    inner = spec.intermediate_size
    names = ("gate", "up") if spec.gated else ("up",)
    tree = {name: Param((inner, width), ("mlp", "embed"), width**-0.5) for name in names}
    tree["down"] = Param((width, inner), ("embed", "mlp"), inner**-0.5)
    if spec.bias:
        tree |= {f"{name}_bias": Param((inner,), ("mlp",), "zeros") for name in names}
        tree["down_bias"] = Param((width,), ("embed",), "zeros")
    return tree


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
    return _map(lambda p: Param((repeat, *p.shape), ("layers", *p.axes), p.init), tree)


def _is_param(leaf: object) -> bool:
    return isinstance(leaf, Param)


def _map(function: Callable[[Param], Any], tree: Any) -> Any:
    return jax.tree.map(function, tree, is_leaf=_is_param)


def _draw(param: Param, key: jax.Array, dtype: str) -> jax.Array:
    if isinstance(param.init, str):
        return (jnp.ones if param.init == "ones" else jnp.zeros)(param.shape, dtype)
    return (param.init * jax.random.normal(key, param.shape, jnp.float32)).astype(dtype)
