"""CPU kernels: products of a few rows with weights in their stored form, and attention over a cache.

Weights lie as [N, K] (out, in), or stacked over layers as [R, N, K] with a layer index, so that the body of a scan
passes the whole stack and nothing is sliced. Every function works under jit, scan and while_loop on CPU; none has a
gradient. Bad shapes and dtypes are a ValueError before anything runs; a layer index out of range fails the computation.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm_cpu._library import isa, matrix_unit, read_bandwidth, threads

__all__ = [
    "INTERFACE", "Q4", "Q8", "attention", "isa", "matrix_unit", "matvec", "matvec_q4", "matvec_q8", "on_matrix_unit",
    "read_bandwidth", "threads", "write",
]  # fmt: skip

INTERFACE = 2  # Counts changes that a caller has to know of.
FLOATS = ("float32", "bfloat16", "float16")
GROUPS = (32, 64, 128, 256)
TILE = 16  # Rows and outputs of a tile of the matrix unit; half its inputs.


class Q8(NamedTuple):
    """8-bit weights: value[n, k] = scales[n, k // g] * values[n, k], g = K / scales.shape[-1].

    values: int8 [N, K] or [R, N, K]; scales: float32, float16 or bfloat16 [.., N, K / g], g one of 32, 64, 128, 256.
    """

    values: jax.Array
    scales: jax.Array


class Q4(NamedTuple):
    """4-bit weights: value = scale * q + min, q in 0..15; without mins value = scale * (q - 8).

    packed: uint8 [.., N, K / 2]. Block i of 32 elements is bytes 16 i .. 16 i + 15 of the row: byte j holds element
    32 i + j in its low nibble and element 32 i + 16 + j in its high one (the order inside GGUF's Q4_0 and Q4_1 blocks).
    scales, mins: float16, bfloat16 or float32 [.., N, K / g], g one of 32, 64, 128, 256.
    """

    packed: jax.Array
    scales: jax.Array
    mins: jax.Array | None = None


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _dtype(name: str, array: jax.Array, allowed: Sequence[str]) -> None:
    _require(array.dtype.name in allowed, f"{name} has dtype {array.dtype.name}, allowed are {', '.join(allowed)}")


def _layer(layer: jax.Array | int | None, stacked: bool) -> jax.Array:
    """The layer index as an int32 scalar; None exactly for a matrix that is not stacked."""
    _require(stacked == (layer is not None), f"layer is {layer}, but it is given exactly if the operand is stacked")
    index = jnp.asarray(0 if layer is None else layer)
    _require(index.shape == () and jnp.issubdtype(index.dtype, jnp.integer), f"layer must be one integer, got {index}")
    return index.astype(jnp.int32)


def _check_x(x: jax.Array) -> None:
    _require(x.ndim == 2, f"x must be [B, K], got shape {x.shape}")
    _dtype("x", x, FLOATS)


def on_matrix_unit(x: jax.Array, weights: Sequence[jax.Array | Q8 | Q4]) -> bool:
    """Whether the matrix unit (AMX), if there is one, computes x [B, K] times these weights, [.., N, K] each.

    It takes bfloat16 rows in a multiple of 16, bfloat16 or quantised weights, N a multiple of 16 and K of 32.
    """
    def fits(w: jax.Array | Q8 | Q4) -> bool:
        first = w[0] if isinstance(w, tuple) else w
        return first.shape[-2] % TILE == 0 and (isinstance(w, tuple) or first.dtype == jnp.bfloat16)

    rows, width = x.shape
    good = x.dtype == jnp.bfloat16 and rows % TILE == 0 and width % (2 * TILE) == 0
    return matrix_unit() and good and all(map(fits, weights))


def _call(target: str, x: jax.Array, layer: jax.Array, operands: list[jax.Array], rows: list[int], dtype, **attributes):
    results = [jax.ShapeDtypeStruct((x.shape[0], n), dtype) for n in rows]
    return jax.ffi.ffi_call(target, results, vmap_method="sequential")(x, layer, *operands, **attributes)


def _result_dtype(x: jax.Array, weights: list, dtype) -> jnp.dtype:
    _require(jnp.dtype(dtype).name in FLOATS[:2], f"dtype is {jnp.dtype(dtype).name}, allowed are float32, bfloat16")
    _require(dtype == jnp.float32 or on_matrix_unit(x, weights), "only products on the matrix unit give bfloat16")
    return jnp.dtype(dtype)


def matvec(
    x: jax.Array, w: jax.Array | Sequence[jax.Array], layer: jax.Array | int | None = None, *, dtype=jnp.float32
):
    """y[b, n] = sum_k x[b, k] w[n, k], float32 sums of float32 products.

    Made for up to some 64 rows, and for more where `on_matrix_unit`; there dtype may be bfloat16, that of the results.

    x: [B, K]; w: [N, K], or [R, N, K] with `layer`; each float32, bfloat16 or float16 -> float32 [B, N].
    A list of matrices of one dtype (query, key and value, say) is one call and gives a list of results.
    """
    many = isinstance(w, (list, tuple))
    weights = list(w) if many else [w]
    _check_x(x)
    _require(bool(weights), "w is an empty list")
    for a in weights:
        _require(a.ndim in (2, 3), f"w must be [N, K] or [R, N, K], got shape {a.shape}")
        _require(a.ndim == weights[0].ndim, "matrices of one call must all be stacked, or none")
        _require(a.shape[-1] == x.shape[1], f"x has width {x.shape[1]} but w has width {a.shape[-1]}")
        _dtype("w", a, FLOATS)
        _require(a.dtype == weights[0].dtype, "matrices of one call must have one dtype")
    index = _layer(layer, weights[0].ndim == 3)
    rows, result = [a.shape[-2] for a in weights], _result_dtype(x, weights, dtype)
    out = _call("jaxlm_cpu_matvec", x, index, weights, rows, result)
    return out if many else out[0]


def _check_quantised(x: jax.Array, name: str, values: jax.Array, per_item: int, numbers: list[jax.Array]) -> int:
    """Checks one quantised matrix against x; returns its scale group."""
    _require(values.ndim in (2, 3), f"{name} must have 2 dimensions, or 3 when stacked, got shape {values.shape}")
    width = values.shape[-1] * per_item
    _require(width == x.shape[1], f"x has width {x.shape[1]} but {name} holds {width} values per row")
    for a in numbers:
        _dtype("scales", a, FLOATS)
        _require(a.shape[:-1] == values.shape[:-1], f"scales have shape {a.shape}, {name} {values.shape}")
        _require(a.dtype == numbers[0].dtype and a.shape == numbers[0].shape, "mins must be like scales")
    columns = numbers[0].shape[-1]
    group = width // columns if columns and width % columns == 0 else 0
    _require(group in GROUPS, f"{columns} scales for {width} values per row: the group must be one of {GROUPS}")
    return group


def _matvec_quant(x, weights, layer, bits: int, int8: bool, dtype):
    many = not isinstance(weights, (Q8, Q4))
    nodes = list(weights) if many else [weights]
    _check_x(x)
    _require(bool(nodes), "w is an empty list")
    operands, groups = [], set()
    for node in nodes:
        name, stored = ("packed", "uint8") if bits == 4 else ("values", "int8")
        arrays = [a for a in node if a is not None]
        _dtype(name, arrays[0], (stored,))
        group = _check_quantised(x, name, arrays[0], 8 // bits, arrays[1:])
        groups.add((group, len(arrays), arrays[0].ndim))
        operands += arrays
    _require(len(groups) == 1, "matrices of one call must agree in group, mins and stacking")
    group, count, rank = groups.pop()
    attributes = {"bits": np.int64(bits), "group": np.int64(group), "mins": count == 3, "int8": bool(int8)}
    rows, result = [node[0].shape[-2] for node in nodes], _result_dtype(x, nodes, dtype)
    out = _call("jaxlm_cpu_matvec_quant", x, _layer(layer, rank == 3), operands, rows, result, **attributes)
    return out if many else out[0]


def matvec_q8(
    x: jax.Array, w: Q8 | Sequence[Q8], layer: jax.Array | int | None = None, *, int8: bool = False,
    dtype=jnp.float32,
):  # fmt: skip
    """`matvec` with 8-bit weights. Exact (the decoded weights in float32) unless `int8`.

    int8=True may round x to 8 bits per 32 elements where the machine has an integer dot product: faster for several
    rows, with an error of up to 1/254 of each block's largest |x| per element. On the matrix unit the decoded weights
    are rounded to bfloat16.
    """
    return _matvec_quant(x, w, layer, 8, int8, dtype)


def matvec_q4(
    x: jax.Array, w: Q4 | Sequence[Q4], layer: jax.Array | int | None = None, *, int8: bool = False,
    dtype=jnp.float32,
):  # fmt: skip
    """`matvec` with 4-bit weights. Exact (the decoded weights in float32) unless `int8`; see `matvec_q8`."""
    return _matvec_quant(x, w, layer, 4, int8, dtype)


def attention(
    q: jax.Array,
    k_new: jax.Array,
    v_new: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    layer: jax.Array | int | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    chunk: int = 0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of the new tokens of each row over the stored ones and themselves; reads only what is seen.

    q: [B, T, H, h]; k_new, v_new: [B, T, K, h]; caches: float32 or bfloat16 [B, S, K, h], or [R, B, S, K, h] with
    `layer`; lengths: int32 [B], tokens stored so far -> float32 [B, T, H, h]. Query head j uses key head j // (H / K).
    The cache is a ring: position p lies in slot p mod S, and the last S positions are there. Query t of a row of length
    n is at position n + t and sees position p if p <= n + t, n + t - p < window and (n + t) // chunk == p // chunk
    (0: no limit). Scores are scale * (q . k), scale 1/sqrt(h) by default, then softcap * tanh(score / softcap) if
    softcap > 0. sinks: float32 [H], logits that take part in the softmax but carry no value.
    """
    _require(q.ndim == 4, f"q must be [B, T, H, h], got shape {q.shape}")
    B, T, H, h = q.shape
    _require(k_cache.ndim in (4, 5), f"the cache must be [B, S, K, h] or [R, B, S, K, h], got shape {k_cache.shape}")
    _require(k_cache.shape == v_cache.shape, f"k_cache has shape {k_cache.shape}, v_cache {v_cache.shape}")
    _require(k_cache.dtype == v_cache.dtype and k_new.dtype == v_new.dtype, "keys and values must have one dtype")
    K = k_cache.shape[-2]
    _require(k_cache.shape[-4] == B and k_cache.shape[-1] == h, f"q has shape {q.shape}, the cache {k_cache.shape}")
    _require(K > 0 and H % K == 0, f"{H} query heads are not a multiple of {K} key heads")
    for name, a in (("k_new", k_new), ("v_new", v_new)):
        _require(a.shape == (B, T, K, h), f"{name} must be {(B, T, K, h)}, got {a.shape}")
        _dtype(name, a, FLOATS)
    _dtype("q", q, FLOATS)
    _dtype("k_cache", k_cache, FLOATS[:2])
    _dtype("lengths", lengths, ("int32",))
    _require(lengths.shape == (B,), f"lengths must be {(B,)}, got {lengths.shape}")
    for name, number in (("window", window), ("chunk", chunk), ("softcap", softcap)):
        _require(number >= 0, f"{name} is {number}, but must not be negative")
    if sinks is not None:
        _require(sinks.shape == (H,), f"sinks must be {(H,)}, got {sinks.shape}")
    sink_logits = jnp.zeros((0,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    call = jax.ffi.ffi_call(
        "jaxlm_cpu_attention", jax.ShapeDtypeStruct(q.shape, jnp.float32), vmap_method="sequential"
    )
    operands = (q, k_new, v_new, k_cache, v_cache, _layer(layer, k_cache.ndim == 5), lengths, sink_logits)
    numbers = {"scale": np.float32(h**-0.5 if scale is None else scale), "softcap": np.float32(softcap)}
    return call(*operands, **numbers, window=np.int64(window), chunk=np.int64(chunk))


def write(cache: jax.Array, new: jax.Array, lengths: jax.Array, counts: jax.Array) -> jax.Array:
    """The cache with the first counts [B] of the new tokens in their slots; in place where XLA may reuse the operand.

    cache: float32, bfloat16 or float16 [R, B, S, K, h]; new: [R, B, T, K, h] in the cache's dtype, or float32 for a
    bfloat16 cache; lengths: int32 [B], tokens stored so far. Token t goes to slot (length + t) mod S; of more than S
    tokens the last S stay.
    """
    _require(cache.ndim == 5 and new.ndim == 5, f"cache and new must have 5 axes, got {cache.shape} and {new.shape}")
    same = cache.shape[:2] + cache.shape[3:] == new.shape[:2] + new.shape[3:]
    _require(same, f"cache has shape {cache.shape}, new {new.shape}: they may differ in their third axis only")
    _dtype("cache", cache, FLOATS)
    _dtype("new", new, (cache.dtype.name, "float32") if cache.dtype == jnp.bfloat16 else (cache.dtype.name,))
    for name, a in (("lengths", lengths), ("counts", counts)):
        _dtype(name, a, ("int32",))
        _require(a.shape == cache.shape[1:2], f"{name} must be {cache.shape[1:2]}, got {a.shape}")
    result = jax.ShapeDtypeStruct(cache.shape, cache.dtype)
    call = jax.ffi.ffi_call("jaxlm_cpu_write", result, vmap_method="sequential", input_output_aliases={0: 0})
    return call(cache, new, lengths, counts)
