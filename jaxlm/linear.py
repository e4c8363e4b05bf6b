"""The one seam through which every weight is multiplied."""

import jax
import jax.numpy as jnp


def project(spec: str, x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """einsum(spec, x, weight), accumulated in float32, returned in `dtype` (default: that of x).

    The product runs in the precision that `jax.default_matmul_precision` sets.
    """
    # A narrow result type would leave the fast path of several backends: accumulate wide, cast after.
    wide = jnp.einsum(spec, x, weight, preferred_element_type=jnp.float32)
    return wide.astype(x.dtype if dtype is None else dtype)


def add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x [..., *bias.shape] + bias; x itself where there is none."""
    return x if bias is None else x + jnp.broadcast_to(bias.astype(x.dtype), x.shape)
