"""Normalisation over the last axes, in float32 whatever the input's dtype."""

import jax
import jax.numpy as jnp

from jaxlm.config import NormSpec


def norm(params: dict[str, jax.Array], x: jax.Array, spec: NormSpec, axes: int = 1) -> jax.Array:
    """RMSNorm, x / sqrt(mean(x^2) + eps), or LayerNorm, (x - mean) / sqrt(var + eps); times scale, plus bias, if any.

    x [..., D] any float dtype -> the same shape and dtype. Means run over the last `axes` axes. scale and bias have the
    shape of trailing axes of x.
    """
    over = tuple(range(-axes, 0))
    wide = x.astype(jnp.float32)
    if spec.kind == "layer":
        wide = wide - jnp.mean(wide, axis=over, keepdims=True)
    power = jnp.mean(jnp.square(wide), axis=over, keepdims=True) + spec.eps
    # eps may be 0: a zero vector must give zeros, and gradients that are finite through both arms of the `where`.
    inverse = jnp.where(power > 0, jax.lax.rsqrt(jnp.where(power > 0, power, 1.0)), 0.0)
    normed = wide * inverse
    if spec.unit_offset:
        normed = normed * (1.0 + _trailing(params["scale"].astype(jnp.float32), x))
        shifted = normed + _trailing(params["bias"].astype(jnp.float32), x) if spec.bias else normed
        return shifted.astype(x.dtype)
    normed = normed.astype(x.dtype)
    scaled = normed * _trailing(params["scale"].astype(x.dtype), x) if spec.scale else normed
    return scaled + _trailing(params["bias"].astype(x.dtype), x) if spec.bias else scaled


def _trailing(weight: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.broadcast_in_dim(weight, x.shape, tuple(range(x.ndim - weight.ndim, x.ndim)))
