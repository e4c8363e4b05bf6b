"""Attention on a GPU by cuDNN, through `jax.nn.dot_product_attention`.

The call lowers for CUDA and its formulation equals the plain one; neither has been run on a GPU, nor has its speed
been measured.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.cache import KV
from jaxlm.visible import held, visible


def capability() -> tuple[int, int]:
    """The compute capability of the first GPU; (0, 0) where it is not NVIDIA's."""
    parts = str(getattr(jax.local_devices()[0], "compute_capability", "")).split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(p.isdigit() for p in parts) else (0, 0)


def attention(
    q: jax.Array, positions: jax.Array, new: KV, past: Any, spec: Any, implementation: Any = "cudnn"
) -> jax.Array:
    """New tokens' attention to themselves and to a cached past, [B,T,H,h] in q's dtype.

    q [B,T,H,h]; positions int32 [B,T], rising by one; new: KV [B,T,K,h]; past: None or KV [B,S,K,h] with positions
    [B,S], slot s holding a position p with p mod S = s. Serves windows and chunks; not softcap, sinks or alibi (JAX
    rounds cuDNN's log-sum-exp to 16 bits, which is too coarse to merge with).
    """
    if past is None:
        return alone(q, positions, new, spec, implementation)
    return (one_more if q.shape[1] == 1 else several)(q, positions, new, past, spec, implementation)


def both(kv: KV) -> tuple[jax.Array, jax.Array]:
    """Keys and values, of a layer that has values."""
    assert kv.v is not None
    return kv.k, kv.v


def alone(q: jax.Array, positions: jax.Array, new: KV, spec: Any, implementation: Any) -> jax.Array:
    """No past: causal, or within the window, or by a mask within chunks."""
    window = (spec.window - 1, 0) if spec.window else None
    mask = visible(positions, positions, spec)[:, None] if spec.chunk else None
    return jax.nn.dot_product_attention(
        q, *both(new), mask=mask, scale=spec.softmax_scale, is_causal=True, local_window_size=window,
        implementation=implementation,
    )  # fmt: skip


def one_more(
    q: jax.Array, positions: jax.Array, new: KV, past: Any, spec: Any, implementation: Any
) -> jax.Array:
    """One token: its key and value take their slot, and what it sees is then a row's first slots, in any order.

    In a full layer slot p holds position p. In a ring the new token takes the place of the one position that is out of
    reach. So no mask is needed and cuDNN reads the used slots only. Putting the token in place costs what cutting the
    layer out of its stack for a library call costs anyway: one copy.
    """
    length, slots = positions[:, 0], past.positions.shape[1]
    within = length % spec.chunk if spec.chunk else length
    slot = jnp.arange(slots, dtype=jnp.int32)[None, :]
    here = (slot == (length % slots)[:, None])[:, :, None, None]

    k, v = both(new)
    old_k, old_v = both(past.kv)

    def filled(old: jax.Array, fresh: jax.Array) -> jax.Array:
        return jnp.where(here, fresh, held(old, past.positions).astype(fresh.dtype))

    return jax.nn.dot_product_attention(
        q, filled(old_k, k), filled(old_v, v), scale=spec.softmax_scale,
        query_seq_lengths=jnp.ones_like(length), key_value_seq_lengths=jnp.minimum(within + 1, slots),
        implementation=implementation,
    )  # fmt: skip


def several(
    q: jax.Array, positions: jax.Array, new: KV, past: Any, spec: Any, implementation: Any
) -> jax.Array:
    """Several tokens after a past: all keys in one row, and a mask."""
    k, v = (
        jnp.concatenate([held(old, past.positions).astype(q.dtype), fresh], axis=1)
        for old, fresh in zip(both(past.kv), both(new), strict=True)
    )
    seen = visible(positions, jnp.concatenate([past.positions, positions], axis=1), spec)
    return jax.nn.dot_product_attention(
        q, k, v, mask=seen[:, None], scale=spec.softmax_scale, implementation=implementation
    )
