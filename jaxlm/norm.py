"""Normalisation over the last axis, in float32 whatever the input's dtype."""

import jax
import jax.numpy as jnp

from jaxlm.config import NormSpec


def norm(params: dict[str, jax.Array], x: jax.Array, spec: NormSpec) -> jax.Array:
    """RMSNorm, x / sqrt(mean(x^2) + eps) * scale, or LayerNorm, (x - mean) / sqrt(var + eps) * scale; + bias if any.

    x [..., D] any float dtype -> the same shape and dtype.
    """
    wide = x.astype(jnp.float32)
    if spec.kind == "layer":
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    # eps may be 0: a zero vector must give zeros and finite gradients, hence the floor.
    power = jnp.maximum(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + spec.eps, jnp.finfo(jnp.float32).tiny)
    normed = (wide * jax.lax.rsqrt(power)).astype(x.dtype)
    scaled = normed * _along_last(params["scale"], x)
    return scaled + _along_last(params["bias"], x) if spec.bias else scaled


def _along_last(vector: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.broadcast_in_dim(vector.astype(x.dtype), x.shape, (x.ndim - 1,))
