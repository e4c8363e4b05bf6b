"""Products with quantised weights on a GPU or TPU that leave the numbers in memory as narrow as they are stored.

XLA reads a small integer or fp8 operand as it is where a mere conversion stands between it and the product. A scale per
group stands in the way: written as a widened weight, it makes XLA store a wide copy of the whole layer. So the scales
are applied after the product, or spread out by a product of their own. What the forms leave in memory was read off
programs compiled for v5e and H100; their speed has not been measured.

| backend | scales | rows | form | beside the weight, for [4096, 4096] in int8 by groups of 32 |
| --- | --- | --- | --- | --- |
| any | one per output | any | `whole` | nothing; on a GPU for more than one row a layer's cut from its stack |
| gpu | any | 1 | `apart` | a float32 per group and output |
| gpu | by group | more | none: widened | a layer's matrix |
| tpu | by group | up to 8 | `diagonal` | nothing |
| tpu | by group | more | `spread` | nothing |
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.accelerator import platform
from jaxlm.cpu import input_axes
from jaxlm.quant import Q4, Q8

FEW_ROWS = 8  # Beyond, the rows times groups of `diagonal` cost more than widening inside the product.
APART = 128  # Lanes that `apart` sums at once where all share a scale.


def product(spec: str, x: jax.Array, weight: Any) -> jax.Array | None:
    """einsum(spec, x, weight) in float32 for a quantised node that lies as outputs by inputs; or None."""
    on, inputs = platform(), input_axes(spec)
    numbers = weight[0]
    if not on or not inputs or numbers.dtype == jnp.uint8:  # Two numbers in a byte: a layout for the CPU.
        return None
    outputs = numbers.shape[: numbers.ndim - inputs]
    flat = jax.tree.map(lambda a: a.reshape(math.prod(outputs), -1), weight)
    rows = x.reshape(-1, flat[0].shape[1])
    if on == "gpu" and rows.shape[0] == 1:
        form = apart
    elif flat.scales.shape[1] == 1:
        form = whole
    elif on == "gpu":
        return None
    else:
        form = diagonal if rows.shape[0] <= FEW_ROWS else spread
    return form(rows, flat).reshape(*x.shape[: x.ndim - inputs], *outputs)


def whole(x: jax.Array, weight: Q8 | Q4) -> jax.Array:
    """One scale per output: applied to the finished product. [M,K] -> [M,N], as in all forms."""
    numbers, scales, mins = parts(weight)
    made = jnp.einsum("MK,NK->MN", x, numbers.astype(x.dtype), preferred_element_type=jnp.float32)
    return made * scales[:, 0][None, :] + shift(x, mins)


def apart(x: jax.Array, weight: Q8 | Q4) -> jax.Array:
    """Every group by itself, its sum times its scale: for one row XLA makes a reduction of it that reads the stack."""
    numbers, scales, mins = parts(weight)
    outputs, width = numbers.shape
    groups = scales.shape[1]
    if groups == 1 and width % APART == 0:
        groups = width // APART
    split = x.reshape(x.shape[0], groups, -1)
    narrow = numbers.reshape(outputs, groups, -1).astype(x.dtype)
    sums = jnp.einsum("MGg,NGg->MNG", split, narrow, preferred_element_type=jnp.float32)
    return jnp.sum(sums * scales[None], axis=2) + shift(x, mins)


def diagonal(x: jax.Array, weight: Q8 | Q4) -> jax.Array:
    """A row's groups laid out as the blocks of a diagonal, [K,G]: one plain product gives every group's sum."""
    numbers, scales, mins = parts(weight)
    groups = scales.shape[1]
    blocks = x.reshape(x.shape[0], groups, -1, 1) * jnp.eye(groups, dtype=x.dtype)[None, :, None, :]
    blocks = blocks.reshape(*x.shape, groups)
    sums = jnp.einsum("NK,MKG->MNG", numbers.astype(x.dtype), blocks, preferred_element_type=jnp.float32)
    return jnp.sum(sums * scales[None], axis=2) + shift(x, mins)


def spread(x: jax.Array, weight: Q8 | Q4) -> jax.Array:
    """Scales brought to every number by a product with zeros and ones, which fuses where a broadcast does not."""
    numbers, scales, mins = parts(weight)
    groups = scales.shape[1]
    belongs = jnp.repeat(jnp.eye(groups, dtype=jnp.float32), numbers.shape[1] // groups, axis=1)
    wide = numbers.astype(jnp.float32) * jnp.dot(scales, belongs, precision="highest")
    if mins is not None:
        wide = wide + jnp.dot(mins, belongs, precision="highest")
    return jnp.einsum("MK,NK->MN", x, wide.astype(x.dtype), preferred_element_type=jnp.float32)


def parts(weight: Q8 | Q4) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Numbers [N,K], scales and what is added to every number, if anything, [N,G] in float32."""
    scales = weight.scales.astype(jnp.float32)
    if isinstance(weight, Q8):
        return weight.values, scales, None
    return weight.packed, scales, -8.0 * scales if weight.mins is None else weight.mins.astype(jnp.float32)


def shift(x: jax.Array, mins: jax.Array | None) -> jax.Array:
    """What adding `mins` [N,G] to every number of a group adds to the products. [M,N], or 0."""
    if mins is None:
        return jnp.float32(0)
    sums = jnp.sum(x.astype(jnp.float32).reshape(x.shape[0], mins.shape[1], -1), axis=2)
    return jnp.einsum("MG,NG->MN", sums, mins, precision="highest")
