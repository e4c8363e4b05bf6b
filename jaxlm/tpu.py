"""Attention on a TPU: a kernel for one new token over a cache, and JAX's splash attention for many.

Both compile for v5e and v6e and equal the plain formula in interpret mode; their speed has not been measured.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from jaxlm.cache import KV
from jaxlm.visible import first_visible, held

HIDDEN = -1e30
LANES = 128  # Splash attention works on blocks of whole multiples of this many tokens.
LARGEST_BLOCK = 512
BLOCK_BYTES = 1 << 19  # Of the keys that one step of the decode kernel works on.
BLOCK_COLUMNS = 2048  # Scores per query head that one step makes: slots times key heads.


class Plan(NamedTuple):
    """What is static: slots per block, blocks, slots, key heads, the scores' scale and softcap, whether sinks."""

    block: int
    blocks: int
    slots: int
    heads: int
    scale: float
    softcap: float
    sinks: bool


def decode_attention(
    q: jax.Array, new: KV, stack: KV, layer: jax.Array, lengths: jax.Array, spec: Any, sinks: jax.Array | None,
    interpret: bool = False,
) -> jax.Array:  # fmt: skip
    """One new token's attention over a stacked cache, [B,H,h] in q's dtype.

    q [B,H,h]; new: KV [B,K,h]; stack: KV [R,B,S,K,h], of which layer `layer` is read, where slot s of a row holds the
    largest position p below lengths [B] with p mod S = s. Serves windows, chunks, softcap, sinks, rings and keys that
    are the values too; not alibi. Blocks beyond a row's used slots are not fetched. An online softmax (Milakov &
    Gimelshein 2018) runs over the blocks. All heads share one product, in which a query's scores with other heads'
    keys are hidden: a step is bound by what it reads.
    """
    batch, heads, width = q.shape
    slots, kv_heads = stack.k.shape[2:4]
    block = block_slots(slots, kv_heads, width * stack.k.dtype.itemsize)
    plan = Plan(block, pl.cdiv(slots, block), slots, kv_heads, spec.softmax_scale, spec.softcap, sinks is not None)
    start = jnp.full((heads,), HIDDEN, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    column = jnp.arange(block * kv_heads, dtype=jnp.int32)  # Keys of a block: slot by slot, in each head by head.
    own = column[None, :] % kv_heads == (jnp.arange(heads, dtype=jnp.int32) // (heads // kv_heads))[:, None]
    # A product with a single key would be lowered as something else: the new token gets at least 8, all but its own
    # in later slots.
    padding = ((0, 0), (0, max(8 - kv_heads, 0)), (0, 0))
    fresh = [jnp.pad(a, padding) for a in new if a is not None]
    cached = [a for a in stack if a is not None]
    slot = column // kv_heads
    constant = [start[:, None], own.astype(jnp.int32), slot[None, :], slot[:, None]]

    def used(b: jax.Array, j: jax.Array, layer: Any, lengths: Any, first: Any) -> tuple[Any, ...]:
        last = jax.lax.div(jnp.maximum(jnp.minimum(lengths[b], slots) - 1, 0), block)
        return layer[0], b, jnp.minimum(j, last), 0, 0  # A block that is asked for again is not fetched again.

    def row(a: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *a.shape[1:]), lambda b, j, *_: (b, 0, 0))

    return pl.pallas_call(
        functools.partial(_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, plan.blocks),
            in_specs=[
                row(q),
                *[pl.BlockSpec(a.shape, lambda b, j, *_: (0, 0)) for a in constant],
                *[row(a) for a in fresh],
                *[pl.BlockSpec((None, None, block, kv_heads, width), used) for _ in cached],
            ],
            out_specs=row(q),
            scratch_shapes=[pltpu.VMEM((heads, n), jnp.float32) for n in (1, 1, width)],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(layer.reshape(1), lengths, first_visible(lengths, spec), q, *constant, *fresh, *cached)


def block_slots(slots: int, heads: int, key_bytes: int) -> int:
    """How many slots a block has: a multiple of 8, up to all of them."""
    most = min(BLOCK_BYTES // (heads * key_bytes), BLOCK_COLUMNS // heads)
    return min(max(most // 8, 1), pl.cdiv(slots, 8)) * 8


def _kernel(plan: Plan, layer: Any, lengths: Any, first: Any, *refs: Any) -> None:
    q_ref, start, own, across, down, *keys, out, highest, total, mixed = refs
    fresh, cached = keys[: len(keys) // 2], keys[len(keys) // 2 :]  # Of keys alone, or of keys and of values.
    row, j = pl.program_id(0), pl.program_id(1)
    q, length, low = q_ref[...], lengths[row], first[row]

    def fold(k: jax.Array, v: jax.Array, seen: jax.Array) -> None:
        """Take in scores [H,N] of keys and values [N,h]."""
        scores = jax.lax.dot_general(q, k.astype(q.dtype), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        scores = scores * plan.scale
        if plan.softcap:
            scores = plan.softcap * jnp.tanh(scores / plan.softcap)
        scores = jnp.where(seen, scores, HIDDEN)
        before = highest[...]
        after = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        kept, weights = jnp.exp(before - after), jnp.exp(scores - after)
        highest[...] = after
        total[...] = kept * total[...] + jnp.sum(weights, axis=1, keepdims=True)
        mixed[...] = kept * mixed[...] + jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)

    @pl.when(j == 0)
    def _() -> None:
        highest[...] = start[...]
        total[...] = jnp.full(total.shape, 1.0 if plan.sinks else 0.0, jnp.float32)
        mixed[...] = jnp.zeros(mixed.shape, jnp.float32)
        count = fresh[0].shape[0]
        fold(fresh[0][...], fresh[-1][...], (own[:, :count] > 0) & (across[:, :count] == 0))

    @pl.when(j * plan.block < jnp.minimum(length, plan.slots))
    def _() -> None:
        turn = length - jax.lax.rem(length, plan.slots)  # The position that slot 0 has in this turn around the ring.

        def visible(offset: jax.Array) -> jax.Array:
            slot = offset + j * plan.block
            position = slot + jnp.where(turn + slot < length, turn, turn - plan.slots)
            return (position >= low) & (slot < plan.slots)

        k, v = (a[...].reshape(-1, a.shape[-1]) for a in (cached[0], cached[-1]))
        # An empty slot may hold anything, NaN included, and 0 * NaN is NaN.
        fold(k, jnp.where(visible(down[...]), v, jnp.zeros_like(v)), visible(across[...]) & (own[...] > 0))

    @pl.when(j == plan.blocks - 1)
    def _() -> None:
        out[...] = (mixed[...] / total[...]).astype(out.dtype)


def prefill_attention(
    q: jax.Array, new: KV, past: Any, spec: Any, sinks: jax.Array | None, interpret: bool = False
) -> jax.Array:
    """Many new tokens' attention to themselves and, without a window, to a cached past. [B,T,H,h] in q's dtype.

    q [B,T,H,h]; new: KV [B,T,K,h], positions rising by one; past: None or KV [B,S,K,h] with positions [B,S]; T and S
    multiples of 128. Serves windows, softcap and sinks. Each part's output is merged by its log-sum-exp. Has a gradient
    where there is neither past nor sinks.
    """
    size = (q.shape[1], q.shape[1])
    causal = masks.LocalMask(size, (spec.window - 1, 0), 0) if spec.window else masks.CausalMask(size)
    if past is None and sinks is None:
        return _splash(q, new, causal, None, spec, interpret, residual=False)
    parts = [_splash(q, new, causal, None, spec, interpret, residual=True)]
    if past is not None:
        there = past.positions >= 0
        clean = KV(*(held(a, past.positions).astype(q.dtype) for a in past.kv))
        full = masks.FullMask((q.shape[1], there.shape[1]))
        parts.append(_splash(q, clean, full, there.astype(jnp.int32), spec, interpret, residual=True))
    return merge(parts, sinks).astype(q.dtype)


def merge(parts: list[tuple[jax.Array, jax.Array]], sinks: jax.Array | None) -> jax.Array:
    """One softmax out of several: (output [B,T,H,h], log-sum-exp [B,T,H]) of each part, sinks [H] -> float32."""
    sums = [lse for _, lse in parts]
    if sinks is not None:
        sums.append(jnp.broadcast_to(sinks.astype(jnp.float32), sums[0].shape))
    shares = jax.nn.softmax(jnp.stack(sums), axis=0)
    return sum(share[..., None] * out.astype(jnp.float32) for share, (out, _) in zip(shares, parts, strict=False))


def _splash(
    q: jax.Array, kv: KV, mask: Any, there: jax.Array | None, spec: Any, interpret: bool, residual: bool
) -> Any:
    """Splash attention [B,T,H,h], with `residual` its log-sum-exp [B,T,H] too. there int32 [B,S]: 1 where a key is."""
    q_block, kv_block = (max(b for b in (128, 256, LARGEST_BLOCK) if n % b == 0) for n in mask.shape)
    blocks = splash.BlockSizes(q_block, kv_block, kv_block, q_block, kv_block, kv_block, q_block, kv_block)
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * q.shape[2]), block_sizes=blocks, save_residuals=residual,
        attn_logits_soft_cap=spec.softcap or None, interpret=interpret,
    )  # fmt: skip
    scaled = (q.astype(jnp.float32) * spec.softmax_scale).astype(q.dtype)
    heads_first = [jnp.swapaxes(a, 1, 2) for a in (scaled, *kv) if a is not None]
    if there is None:
        made = jax.vmap(kernel)(*heads_first)
    else:
        segments = splash.SegmentIds(jnp.ones(q.shape[:2], jnp.int32), there)
        made = jax.vmap(kernel)(*heads_first, segments)
    if not residual:
        return jnp.swapaxes(made, 1, 2)
    return jnp.swapaxes(made[0], 1, 2), jnp.swapaxes(made[1][0], 1, 2)
