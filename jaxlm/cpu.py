"""The seam to the optional CPU kernels (package jaxlm-cpu): used where they are installed and fit, else nothing here.

They read weights and cache as they are stored, straight from a stack of layers; XLA's CPU backend would first copy a
layer out and widen it. Each function returns None where the kernels do not serve, and the caller goes the plain way.
Set JAXLM_KERNELS=0 to leave them off.
"""

import functools
import importlib
import math
import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.quant import Q4, Q8, Layer

INTERFACE = 2  # Of the kernel package.
MOST_ROWS = 64  # Beyond, XLA's products make up for the copy that it takes of a layer, but for a matrix unit's.
FEW_ROWS = 8  # Up to here a matrix unit does not pay.
TILE = 16  # Rows of a tile of the matrix unit.
FLOATS = ("float32", "bfloat16", "float16")


@functools.cache
def kernels() -> Any:
    """The kernel package, or None."""
    if os.environ.get("JAXLM_KERNELS", "1") == "0" or jax.default_backend() != "cpu":
        return None
    try:
        module = importlib.import_module("jaxlm_cpu")
    except ImportError:
        return None
    if getattr(module, "INTERFACE", 1) == INTERFACE:
        return module
    warnings.warn("jaxlm-cpu is installed in another version, and left unused: pip install ./kernels", stacklevel=2)
    return None


def matvec(specs: list[str], x: jax.Array, weights: list[Any], dtype: Any) -> list[jax.Array] | None:
    """The products, for weights that lie as outputs by inputs and as many rows as the kernels are good for; or None."""
    module = kernels()
    if module is None:
        return None
    counts = {input_axes(spec) for spec in specs}
    inputs = counts.pop()
    if counts or not inputs:
        return None
    lead = x.shape[: x.ndim - inputs]
    rows = math.prod(lead)
    stacks = [w.stack if isinstance(w, Layer) else w for w in weights]
    kinds = {(isinstance(w, Layer), type(s)) for w, s in zip(weights, stacks, strict=True)}
    if len(kinds) != 1 or not all(_fits(s) for s in stacks):
        return None
    index = weights[0].number if isinstance(weights[0], Layer) else None
    flat = [_flatten(stack, inputs, index is not None) for stack in stacks]
    x = x.reshape(rows, -1)
    padded = jnp.pad(x, ((0, -rows % TILE), (0, 0)))
    unit = rows > FEW_ROWS and module.on_matrix_unit(padded, flat)
    if not unit and rows > MOST_ROWS:
        return None
    kind = {Q8: module.matvec_q8, Q4: module.matvec_q4}.get(type(stacks[0]), module.matvec)
    given = jnp.bfloat16 if unit and dtype == jnp.bfloat16 else jnp.float32
    products = kind(padded if unit else x, flat, index, dtype=given)
    first = 0 if index is None else 1
    shapes = [jax.tree.leaves(stack)[0].shape[first:-inputs] for stack in stacks]
    return [p[:rows].reshape(*lead, *shape).astype(dtype) for p, shape in zip(products, shapes, strict=True)]


def input_axes(spec: str) -> int:
    """How many axes of inputs a weight has, where it is laid out as outputs, then inputs; else 0."""
    operands, result = spec.replace("...", "").split("->")
    x, weight = operands.split(",")
    inputs = "".join(letter for letter in x if letter not in result)
    outputs = "".join(letter for letter in weight if letter not in x)
    lead = x[: len(x) - len(inputs)]
    plain = x == lead + inputs and weight == outputs + inputs and result == lead + outputs
    return len(inputs) if plain else 0


def _fits(stack: Any) -> bool:
    if isinstance(stack, (Q8, Q4)):
        stored = "int8" if isinstance(stack, Q8) else "uint8"
        return stack[0].dtype.name == stored and stack.scales.dtype.name in FLOATS
    return isinstance(stack, jax.Array) and stack.dtype.name in FLOATS


def _flatten(stack: Any, inputs: int, stacked: bool) -> Any:
    """[R, out..., in...] as [R, N, K]."""
    first = 1 if stacked else 0

    def flat(a: jax.Array) -> jax.Array:
        width = math.prod(a.shape[a.ndim - inputs :])
        return a.reshape(*a.shape[:first], -1, width)

    module = kernels()
    flattened = jax.tree.map(flat, stack)
    if isinstance(stack, Q8):
        return module.Q8(*flattened)
    return module.Q4(*flattened) if isinstance(stack, Q4) else flattened


def attention(
    q: jax.Array, new: Any, past: Any, lengths: jax.Array, spec: Any, sinks: jax.Array | None = None
) -> jax.Array | None:
    """Attention of new tokens over a stacked cache and themselves, [B,T,H,h] in q's dtype; or None.

    q [B,T,H,h]; new: KV [B,T,K,h]; past: KV of `Layer`s of [R,B,S,K,h]; lengths [B]: how many positions were written.
    Only the slots that are seen are read, however many the cache has.
    """
    module = kernels()
    if module is None or spec.alibi or not isinstance(past.k, Layer) or past.k.stack.dtype.name not in FLOATS[:2]:
        return None
    values = past.k if past.v is None else past.v
    mixed = module.attention(
        q, new.k, new.k if new.v is None else new.v, past.k.stack, values.stack, lengths, past.k.number,
        scale=spec.softmax_scale, softcap=spec.softcap, window=spec.window, chunk=spec.chunk, sinks=sinks,
    )  # fmt: skip
    return mixed.astype(q.dtype)


def write(old: jax.Array, values: jax.Array, lengths: jax.Array, counts: jax.Array) -> jax.Array | None:
    """A cache [R,B,S,K,h] with the first `counts` [B] of values [R,B,T,K,h] in their slots, in place; or None."""
    module = kernels()
    if module is None or old.dtype.name not in FLOATS:
        return None
    return module.write(old, values.astype(stacked_dtype(old.dtype)), lengths, counts)


def stacked_dtype(dtype: Any) -> Any:
    """What a loop stacks results in that are meant for an array of `dtype`: a 16-bit stack is rewritten as a whole."""
    narrow = jnp.dtype(dtype) == jnp.bfloat16 and jax.default_backend() == "cpu"
    return jnp.dtype(jnp.float32) if narrow else jnp.dtype(dtype)


def cache_dtype(dtype: str) -> str:
    """The dtype of a cache that is written once per token, for a model of `dtype`."""
    return dtype if jax.default_backend() != "cpu" or (kernels() and dtype == "bfloat16") else "float32"


def stacked(dtype: Any) -> bool:
    """Whether a model of `dtype` should leave its layers in their stacks: kernels read them there, and 16-bit stacks
    that are the inputs of a loop would be widened as a whole, ahead of it."""
    return jax.default_backend() == "cpu" and (kernels() is not None or jnp.dtype(dtype).itemsize < 4)
