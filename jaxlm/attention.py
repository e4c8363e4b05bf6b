"""Attention: every token looks at itself and at the tokens before it.

The keys come in parts: what the cache holds of the past, and what this call brings. One softmax runs over all parts, so
the past is only read, and writing the cache is a separate step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.cache import KV
from jaxlm.config import AttentionSpec
from jaxlm.linear import add_bias, project
from jaxlm.rope import rope

HIDDEN = -1e30  # A finite stand-in for minus infinity: a row with no visible key must not turn to NaN.


class Past(NamedTuple):
    """Cached keys and values [B,S,K,h] and the position that each slot holds, int32 [B,S], negative where none."""

    kv: KV
    positions: jax.Array


def attention(
    params: dict[str, Any],
    x: jax.Array,
    spec: AttentionSpec,
    positions: jax.Array | None = None,
    past: Past | None = None,
) -> tuple[jax.Array, KV]:
    """softmax(q k^T * scale) v, causal, with rotary positions (Vaswani et al. 2017; Ainslie et al. 2023 for groups).

    x [B,T,D]; positions int32 [B,T], default 0..T-1 -> (output [B,T,D] in x's dtype, the new keys and values
    [B,T,K,h]).
    """
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None, :], x.shape[:2])
    q = add_bias(project("BTD,HhD->BTHh", x, params["q"]), params.get("q_bias"))
    k = add_bias(project("BTD,KhD->BTKh", x, params["k"]), params.get("k_bias"))
    v = add_bias(project("BTD,KhD->BTKh", x, params["v"]), params.get("v_bias"))
    if spec.rope:
        q, k = rope(q, positions, spec.rope), rope(k, positions, spec.rope)
    new = Past(KV(k, v), positions)
    parts = [new] if past is None or past.positions.shape[1] == 0 else [past, new]
    attended = attend(q, positions, parts, spec)
    return add_bias(project("BTHh,DHh->BTD", attended, params["o"]), params.get("o_bias")), KV(k, v)


def attend(q: jax.Array, positions: jax.Array, parts: list[Past], spec: AttentionSpec) -> jax.Array:
    """Each query's mix of the values of all parts. q [B,T,H,h] -> [B,T,H,h], same dtype; softmax in float32."""
    grouped = q.reshape(*q.shape[:2], spec.num_kv_heads, -1, spec.head_dim)
    masks = [visible(positions, part.positions, spec.window) for part in parts]
    scores = [score(grouped, part.kv.k, mask, spec) for part, mask in zip(parts, masks, strict=True)]
    highest = jnp.max(jnp.stack([jnp.max(s, axis=-1, keepdims=True) for s in scores]), axis=0)
    weights = [jnp.exp(s - highest) for s in scores]
    total = jnp.sum(jnp.stack([jnp.sum(w, axis=-1) for w in weights]), axis=0)
    mixed = [mix(w, part) for w, part in zip(weights, parts, strict=True)]
    summed = jnp.sum(jnp.stack(mixed), axis=0) / jnp.moveaxis(total, -1, 1)[..., None]
    return summed.astype(q.dtype).reshape(q.shape)


def visible(queries: jax.Array, keys: jax.Array, window: int) -> jax.Array:
    """Whether each query may see each key: one that is there, not ahead, within the window. bool [B,T,S]."""
    ahead = queries[:, :, None] - keys[:, None, :]
    seen = (keys[:, None, :] >= 0) & (ahead >= 0)
    return seen & (ahead < window) if window else seen


def score(q: jax.Array, k: jax.Array, mask: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Scaled scores in float32, hidden where masked: q [B,T,K,G,h], k [B,S,K,h] -> [B,K,G,T,S]."""
    raw = jnp.einsum("BTKGh,BSKh->BKGTS", q, k.astype(q.dtype), preferred_element_type=jnp.float32)
    return jnp.where(mask[:, None, None, :, :], raw * spec.softmax_scale, HIDDEN)


def mix(weights: jax.Array, part: Past) -> jax.Array:
    """Values summed by weight, in float32: [B,K,G,T,S] -> [B,T,K,G,h]."""
    # An empty slot may hold anything, NaN included, and 0 * NaN is NaN.
    v = jnp.where(part.positions[:, :, None, None] >= 0, part.kv.v, jnp.zeros_like(part.kv.v))
    return jnp.einsum("BKGTS,BSKh->BTKGh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
