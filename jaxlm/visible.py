"""Which positions a query may look at."""

import jax
import jax.numpy as jnp

from jaxlm.config import AttentionSpec


def visible(queries: jax.Array, keys: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Whether each query may see each key: one that is there, not ahead, within reach. [B,T], [B,S] -> bool [B,T,S]."""
    queries, keys = queries[:, :, None], keys[:, None, :]
    seen = (keys >= 0) & (keys <= queries)
    if spec.window:
        seen &= queries - keys < spec.window
    if spec.chunk:
        seen &= queries // spec.chunk == keys // spec.chunk
    return seen


def held(values: jax.Array, positions: jax.Array) -> jax.Array:
    """Keys or values [B,S,K,h], zero where a slot has no position [B,S]: it may hold anything, and 0 * NaN is NaN."""
    return jnp.where(positions[:, :, None, None] >= 0, values, jnp.zeros_like(values))


def first_visible(positions: jax.Array, spec: AttentionSpec) -> jax.Array:
    """The least position that a query at each position may see; int32, same shape."""
    if spec.chunk:
        return positions // spec.chunk * spec.chunk
    return jnp.maximum(positions - spec.window + 1, 0) if spec.window else jnp.zeros_like(positions)
