"""The one seam through which every weight is multiplied."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm import cpu, narrow
from jaxlm.quant import cut, is_weight, widen


def project(spec: str, x: jax.Array, weight: Any, dtype: Any = None) -> jax.Array:
    """einsum(spec, x, weight), accumulated in float32, returned in `dtype` (default: that of x).

    weight: an array, a quantised node, or one layer of a stack that has not been cut out (jaxlm.quant). The product
    runs in the precision that `jax.default_matmul_precision` sets. For a few rows on a CPU, the optional kernels do it.
    """
    return project_all([spec], x, [weight], dtype)[0]


def project_all(specs: list[str], x: jax.Array, weights: list[Any], dtype: Any = None) -> list[jax.Array]:
    """`project` for several weights on the same x."""
    return products(tuple(specs), jnp.dtype(x.dtype if dtype is None else dtype), x, weights)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def products(specs: tuple[str, ...], dtype: Any, x: jax.Array, weights: list[Any]) -> list[jax.Array]:
    """The products in `dtype`. The kernels have no gradient: differentiated, they are XLA's."""
    return cpu.matvec(list(specs), x, weights, dtype) or wide_products(specs, dtype, x, weights)


@products.defjvp
def products_jvp(specs: tuple[str, ...], dtype: Any, primals: Any, tangents: Any) -> Any:
    return jax.jvp(functools.partial(wide_products, specs, dtype), primals, tangents)


def wide_products(specs: tuple[str, ...], dtype: Any, x: jax.Array, weights: list[Any]) -> list[jax.Array]:
    """`wide_product` for each."""
    return [wide_product(spec, x, weight).astype(dtype) for spec, weight in zip(specs, weights, strict=True)]


def wide_product(spec: str, x: jax.Array, weight: Any) -> jax.Array:
    """The product in float32."""
    weight = cut(weight)
    if is_weight(weight):
        made = narrow.product(spec, x, weight)
        if made is not None:
            return made
        weight = widen(weight, x.dtype)
    if by_head(spec) and jax.default_backend() == "cpu":  # There such a product of bfloat16 is an error at many sizes.
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    # A narrow result type would leave the fast path of several backends: accumulate wide, cast after.
    return jnp.einsum(spec, x, weight, preferred_element_type=jnp.float32)


def by_head(spec: str) -> bool:
    """Whether a spec makes a product of its own for each index of an axis that x, weight and result share."""
    operands, result = spec.split("->")
    x, weight = operands.split(",")
    return bool(set(x) & set(weight) & set(result) - set("."))


def add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x [..., *bias.shape] + bias; x itself where there is none."""
    return x if bias is None else x + jnp.broadcast_to(bias.astype(x.dtype), x.shape)
