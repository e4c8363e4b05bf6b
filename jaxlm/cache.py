"""The KV cache as a plain value.

Per layer it holds K and V [R,B,S,K,h], R being the repeats of the layer's segment, and for each row one length: how
many positions have been processed. A layer without a window has a slot for every position. A layer with window W keeps
a ring of W slots: position p lives in slot p mod S. Since a full layer never wraps, one rule serves both.

A token's K and V are written by the step that processes it: right after a token has been chosen, `lengths` does not
count it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxlm import cpu
from jaxlm.config import AttentionSpec, LatentAttentionSpec, ModelConfig
from jaxlm.errors import RequestError

Attention = AttentionSpec | LatentAttentionSpec


class KV(NamedTuple):
    """Keys and values, each [..., S, K, h]. v None: the keys serve as values too, as a latent does."""

    k: jax.Array
    v: jax.Array | None


@struct.dataclass
class KVCache:
    """layers[i][j] is the `KV` [R,B,S,K,h] of layer j in the unit of segment i; lengths int32 [B].

    None where the layer looks at the keys and values of another.
    """

    layers: tuple[tuple[KV | None, ...], ...]
    lengths: jax.Array


def init_cache(config: ModelConfig, batch: int, max_len: int, dtype: Any = None) -> KVCache:
    """An empty cache for `batch` rows of at most `max_len` tokens. dtype None is that of the config."""
    for name, value in (("batch", batch), ("max_len", max_len)):
        if not isinstance(value, int) or value < 1:
            raise RequestError(f"init_cache: {name} is {value!r}; allowed: an integer of at least 1")
    dtype = jnp.dtype(config.dtype if dtype is None else dtype)

    def empty(spec: Attention, repeat: int) -> KV | None:
        if spec.kv_from:
            return None
        slots = slots_needed(spec, max_len)
        if isinstance(spec, LatentAttentionSpec):
            return KV(jnp.zeros((repeat, batch, slots, 1, spec.kv_rank + spec.rope_dim), dtype), None)
        shape = (repeat, batch, slots, spec.num_kv_heads, spec.head_dim)
        return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    layers = tuple(tuple(empty(layer.attention, s.repeat) for layer in s.unit) for s in config.segments)
    return KVCache(layers, jnp.zeros((batch,), jnp.int32))


def grow(cache: KVCache, config: ModelConfig, max_len: int) -> KVCache:
    """The same cache with room for `max_len` tokens a row. Rings that have their whole window stay as they are."""
    def pad(spec: Attention, kv: KV | None) -> KV | None:
        if kv is None:
            return None
        more = slots_needed(spec, max_len) - kv.k.shape[2]
        return jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, 0), (0, more), (0, 0), (0, 0))), kv)

    layers = tuple(
        tuple(pad(spec.attention, kv) for spec, kv in zip(segment.unit, kvs, strict=True))
        for segment, kvs in zip(config.segments, cache.layers, strict=True)
    )
    return KVCache(layers, cache.lengths)


def slots_needed(spec: Attention, max_len: int) -> int:
    """How many positions a layer can still be asked about, of `max_len`."""
    return min(spec.reach, max_len) if spec.reach else max_len


def capacity(cache: KVCache, config: ModelConfig) -> int | None:
    """How many tokens a row may hold; None where every layer is a ring and there is no limit."""
    limits = [
        kv.k.shape[2]
        for segment, layers in zip(config.segments, cache.layers, strict=True)
        for spec, kv in zip(segment.unit, layers, strict=True)
        if kv and (not spec.attention.reach or kv.k.shape[2] < spec.attention.reach)
    ]
    return min(limits, default=None)


def can_cut_back(config: ModelConfig, held: int, wanted: int) -> bool:
    """Whether the cache of a row of `held` tokens still has all that the tokens after its first `wanted` look at.

    A full layer always does. A ring keeps the last `reach` of the positions before `held`: the first that the next
    token sees, if it sees any, must be among them. Slots that hold another position than `lengths` lets on are then
    out of its sight.
    """
    for spec in {layer.attention for layer in config.layers if layer.attention.reach}:
        oldest = held - spec.reach
        chunk = isinstance(spec, AttentionSpec) and spec.chunk
        seen = wanted // chunk * chunk if chunk else wanted - spec.reach + 1
        if max(seen, 0) < min(oldest, wanted):
            return False
    return True


def rolled_back(before: KVCache, after: KVCache, config: ModelConfig) -> KVCache:
    """`before` again, given what came after it: full layers are those of `after`, which only have more slots filled.

    So where `after` was made in place nothing but rings is copied.
    """
    layers = tuple(
        tuple(old if spec.attention.reach else new for spec, old, new in zip(segment.unit, olds, news, strict=True))
        for segment, olds, news in zip(config.segments, before.layers, after.layers, strict=True)
    )
    return KVCache(layers, before.lengths)


def slot_positions(lengths: jax.Array, slots: int) -> jax.Array:
    """Which position each slot holds, given how many were written: int32 [B,S], negative where there is none yet.

    Slot s holds the largest position p < length with p mod S = s.
    """
    last = lengths[:, None] - 1 - jnp.arange(slots, dtype=jnp.int32)[None, :]
    return jnp.arange(slots, dtype=jnp.int32)[None, :] + slots * jnp.floor_divide(last, slots)


def write(cache: KVCache, new: tuple[tuple[KV | None, ...], ...], counts: jax.Array) -> KVCache:
    """The cache after each row's first `counts` [B] new tokens; new[i][j] is KV [R,B,T,K,h]."""
    layers = jax.tree.map(lambda old, values: put(old, values, cache.lengths, counts), cache.layers, new)
    return KVCache(layers, cache.lengths + counts)


@jax.custom_jvp
def put(old: jax.Array, values: jax.Array, lengths: jax.Array, counts: jax.Array) -> jax.Array:
    """[R,B,S,K,h] with the first `counts` [B] of values [R,B,T,K,h] in their slots. The kernel has no gradient."""
    written = cpu.write(old, values, lengths, counts)
    return scatter(old, values, lengths, counts) if written is None else written


@put.defjvp
def put_jvp(primals: Any, tangents: Any) -> Any:
    return jax.jvp(scatter, primals, tangents)


def scatter(old: jax.Array, values: jax.Array, lengths: jax.Array, counts: jax.Array) -> jax.Array:
    """The same, by XLA."""
    slots = write_slots(lengths, counts, values.shape[2], old.shape[2])
    rows = jnp.arange(old.shape[1], dtype=jnp.int32)[:, None]
    return old.at[:, rows, slots].set(values.astype(old.dtype), mode="drop")


def write_slots(lengths: jax.Array, counts: jax.Array, tokens: int, slots: int) -> jax.Array:
    """The slot of each new token, int32 [B,T]; `slots`, out of range, for padding and for what a ring drops at once."""
    index = jnp.arange(tokens, dtype=jnp.int32)[None, :]
    kept = (index < counts[:, None]) & (index >= counts[:, None] - slots)
    return jnp.where(kept, (lengths[:, None] + index) % slots, slots)
