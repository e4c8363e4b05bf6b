"""Quantised weights: blocks of small integers with a scale each, as pytree nodes that take an array's place.

A node keeps the shape of the array that it stands for, but for its last axis: groups of `group` neighbours along it
share a scale. It is multiplied through `project`, like any weight; only there, or in `widen`, do its numbers become
floats.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.errors import RequestError

GROUP = 32  # Neighbours that share a scale; that of GGUF's Q4_0, Q4_1 and Q8_0.
KINDS = ("int8", "int4", "fp8")
FP8 = jnp.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa, no infinity (Micikevicius et al. 2022).
FP8_MOST = 448.0  # The largest finite one.
Array = Any  # A jax.Array, or a numpy array while a model is being loaded.
LARGE = 16384  # Numbers in a layer's weight from which copying it out would show.


class Q8(NamedTuple):
    """value = scale * number. values int8 or float8_e4m3fn [..., N], scales [..., N / group], the group up to all N."""

    values: Array
    scales: Array


class Q4(NamedTuple):
    """value = scale * q + min with q from 0 to 15; without mins, value = scale * (q - 8).

    packed uint8 [..., N / 2]: of every 32 neighbours, byte j holds number j in its low half and number 16 + j in its
    high half, as in GGUF's blocks; or uint4 [..., N], in order (`for_backend`). scales, mins [..., N / group].
    """

    packed: Array
    scales: Array
    mins: Array | None = None


class Layer(NamedTuple):
    """One layer of a stacked weight [R, ...], not cut out yet: not everyone who is given it needs a copy."""

    stack: Any
    number: jax.Array


def is_weight(node: object) -> bool:
    """Whether a node of the parameter tree stands for one weight, whatever leaves it has."""
    return isinstance(node, (Q8, Q4, Layer))


def cut(weight: Any) -> Any:
    """The weight itself: a `Layer` cut out of its stack, anything else as it is."""
    if not isinstance(weight, Layer):
        return weight
    stack, number = weight
    if jax.default_backend() == "cpu":
        # A 16-bit stack would be widened as a whole, ahead of the loop, unless it seems to change in the loop.
        stack, number = jax.lax.optimization_barrier((stack, number))
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, number, keepdims=False), stack)


def views(stacks: Any, index: jax.Array) -> Any:
    """One layer of a tree of stacked weights: what is large as a `Layer`, what is small cut out at once."""
    def view(stack: Any) -> Any:
        layer = Layer(stack, index)
        return layer if sum(leaf.size // leaf.shape[0] for leaf in jax.tree.leaves(stack)) >= LARGE else cut(layer)

    return jax.tree.map(view, stacks, is_leaf=is_weight)


def pick(weight: Any, rows: jax.Array) -> Any:
    """weight[rows] along its first axis, read straight from the stack where it is a `Layer`."""
    if isinstance(weight, Layer):
        return jax.tree.map(lambda a: a[weight.number, rows], weight.stack)
    return jax.tree.map(lambda a: a[rows], weight)


def widen(weight: Any, dtype: Any) -> jax.Array:
    """A weight as a plain array of the given dtype."""
    weight = cut(weight)
    if isinstance(weight, Q8):
        return _scaled(weight.values, weight.scales, None, dtype)
    if isinstance(weight, Q4):
        return _scaled(unpack(weight.packed), weight.scales, weight.mins, dtype)
    return weight.astype(dtype)


def _scaled(integers: jax.Array, scales: jax.Array, mins: jax.Array | None, dtype: Any) -> jax.Array:
    groups = integers.reshape(*scales.shape, -1).astype(jnp.float32)
    scale = scales[..., None].astype(jnp.float32)
    if mins is not None:
        wide = groups * scale + mins[..., None].astype(jnp.float32)
    else:
        wide = (groups - 8.0 if integers.dtype == jnp.uint8 else groups) * scale
    return wide.reshape(integers.shape).astype(dtype)


def unpack(packed: jax.Array) -> jax.Array:
    """Two numbers from 0 to 15 out of every byte: uint8 [..., N / 2], or uint4 [..., N] -> uint8 [..., N]."""
    if packed.dtype == jnp.uint4:
        return packed.astype(jnp.uint8)
    blocks = packed.reshape(*packed.shape[:-1], -1, GROUP // 2)
    both = jnp.concatenate([blocks & jnp.uint8(15), blocks >> jnp.uint8(4)], axis=-1)
    return both.reshape(*packed.shape[:-1], -1)


def for_backend(node: Any) -> Any:
    """A weight as this backend reads it best: 4-bit numbers in order, as XLA's own type, on a GPU or TPU."""
    if isinstance(node, Q4) and jax.default_backend() in ("gpu", "tpu"):
        return node._replace(packed=jax.jit(lambda packed: unpack(packed).astype(jnp.uint4))(node.packed))
    return node


def quantize(array: np.ndarray, kind: str, group: int = GROUP, name: str = "a weight") -> Any:
    """Round an array to "int8" (symmetric), "int4" (with a minimum) or "fp8", neighbours on the last axis to a scale.

    numpy in, numpy leaves out. `group` neighbours share a float16 scale. fp8 has an exponent of its own and needs but
    one float32 scale for the whole axis, which brings its largest number to 448; so the scale can be applied after a
    product, as hardware's fp8 products want. Raises RequestError if the group does not divide the axis, or for a number
    that is not finite or beyond float16.
    """
    if kind not in KINDS:
        raise RequestError(f"quantize is {kind!r}; allowed: {', '.join(KINDS)}")
    if array.shape[-1] % group:
        raise RequestError(f"a weight of shape {list(array.shape)} has no whole groups of {group} along its last axis")
    highest = np.abs(array).max()
    if not highest <= np.finfo(np.float16).max:  # NaN compares false.
        raise RequestError(f"{name} holds {highest}, which cannot be quantised; allowed: finite numbers up to 65504")
    if kind == "fp8":
        return _to_fp8(np.asarray(array, np.float32))
    groups = np.asarray(array, np.float32).reshape(*array.shape[:-1], -1, group)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    if kind == "int8":
        scales = (np.maximum(high, -low) / 127).astype(np.float16)
        return Q8(_rounded(groups, scales, 0.0, -127, 127).astype(np.int8).reshape(array.shape), scales)
    scales, mins = ((high - low) / 15).astype(np.float16), low.astype(np.float16)
    numbers = _rounded(groups, scales, mins, 0, 15).astype(np.uint8).reshape(*array.shape[:-1], -1, GROUP)
    packed = numbers[..., : GROUP // 2] | numbers[..., GROUP // 2 :] << 4
    return Q4(packed.reshape(*array.shape[:-1], -1), scales, mins)


def _to_fp8(array: np.ndarray) -> Q8:
    scales = np.abs(array).max(axis=-1, keepdims=True) / np.float32(FP8_MOST)
    # A quotient may round to just above the largest number, and what is beyond it would become NaN.
    shrunk = np.clip(array / np.where(scales == 0, 1, scales), -FP8_MOST, FP8_MOST)
    return Q8(shrunk.astype(FP8), scales)


def _rounded(groups: np.ndarray, scales: np.ndarray, offset: Any, least: int, most: int) -> np.ndarray:
    scale = np.where(scales == 0, 1, scales).astype(np.float32)[..., None]
    shifted = groups - np.asarray(offset, np.float32)[..., None]
    return np.clip(np.rint(shifted / scale), least, most)
