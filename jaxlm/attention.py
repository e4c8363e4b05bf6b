"""Attention: every token looks at itself and at the tokens before it.

The keys come in parts: what the cache holds of the past, and what this call brings. One softmax runs over all parts, so
the past is only read, and writing the cache is a separate step.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlm import accelerator, cpu
from jaxlm.accelerator import cut_past, past_of
from jaxlm.cache import KV
from jaxlm.config import AttentionSpec, LatentAttentionSpec, QueryScaling
from jaxlm.linear import add_bias, project, project_all
from jaxlm.norm import norm
from jaxlm.rope import rope
from jaxlm.visible import held, visible

HIDDEN = -1e30  # A finite stand-in for minus infinity: a row with no visible key must not turn to NaN.


class Past(NamedTuple):
    """Cached keys and values [B,S,K,h] and the position that each slot holds, int32 [B,S], negative where none.

    Fewer positions than slots: only the first slots are to be looked at.
    """

    kv: KV
    positions: jax.Array


class Shared(NamedTuple):
    """The keys and values of another layer: its past and what it made in this call."""

    past: Past | None
    new: KV


def attention(
    params: dict[str, Any],
    x: jax.Array,
    spec: AttentionSpec | LatentAttentionSpec,
    positions: jax.Array | None = None,
    past: Past | None = None,
    context: jax.Array | None = None,
    shared: Shared | None = None,
) -> tuple[jax.Array, KV | None]:
    """softmax(q k^T * scale) v, causal (Vaswani et al. 2017; Ainslie et al. 2023 for groups), or the latent form.

    x [B,T,D]; positions int32 [B,T], default 0..T-1, on a GPU or TPU rising by one along each row; context int32 [B]:
    how long each row is in all (see `rope`);
    shared: the keys and values to look at where spec.kv_from says that they are another layer's
    -> (output [B,T,D] in x's dtype, the new keys and values [B,T,K,h], None where the layer makes none).
    """
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None, :], x.shape[:2])
    if context is None:
        context = jnp.max(positions, axis=1) + 1
    if isinstance(spec, LatentAttentionSpec):
        return latent_attention(params, x, spec, positions, past, context)
    return grouped_attention(params, x, spec, positions, past, context, shared)


def grouped_attention(
    params: dict[str, Any],
    x: jax.Array,
    spec: AttentionSpec,
    positions: jax.Array,
    past: Past | None,
    context: jax.Array,
    shared: Shared | None = None,
) -> tuple[jax.Array, KV | None]:
    """Keys and values per head or group of heads."""
    def turned(heads: jax.Array, name: str) -> jax.Array:
        if spec.qk_norm and not spec.qk_norm_after_rope:
            heads = norm_heads(params, heads, name, spec)
        if spec.rope:
            heads = rope(heads, positions, spec.rope, context)
        return norm_heads(params, heads, name, spec) if spec.qk_norm and spec.qk_norm_after_rope else heads

    q, *own = projected_heads(params, x, spec)
    q = turned(q, "q_norm")
    if spec.query_scaling:
        q = scale_queries(q, positions, spec.query_scaling)
    if own:
        v = norm(params.get("v_norm", {}), own[-1], spec.v_norm) if spec.v_norm else own[-1]
        seen = Shared(past, KV(turned(own[0], "k_norm"), v))
    else:
        assert shared
        seen = shared
    sinks = params.get("sinks")
    attended = accelerator.alone(q, positions, seen, spec, sinks)
    if attended is None:
        attended = attend_seen(spec, q, positions, seen, sinks)
    out = add_bias(project("BTHh,DHh->BTD", attended, params["o"]), params.get("o_bias"))
    return out, seen.new if own else None


def projected_heads(params: dict[str, Any], x: jax.Array, spec: AttentionSpec) -> list[jax.Array]:
    """Queries, keys and values as far as the layer makes them, each [B,T,heads,h]."""
    names = "q" if spec.kv_from else "qk" if spec.v_from_k else "qkv"
    forms = {"q": "BTD,HhD->BTHh", "k": "BTD,KhD->BTKh", "v": "BTD,KhD->BTKh"}
    heads = project_all([forms[n] for n in names], x, [params[n] for n in names])
    heads = [add_bias(a, params.get(f"{n}_bias")) for n, a in zip(names, heads, strict=True)]
    return [jnp.clip(a, -spec.clip, spec.clip) for a in heads] if spec.clip else heads


def latent_attention(
    params: dict[str, Any],
    x: jax.Array,
    spec: LatentAttentionSpec,
    positions: jax.Array,
    past: Past | None,
    context: jax.Array,
) -> tuple[jax.Array, KV]:
    """The latent is the one key and value of all heads; what would widen it is moved to the queries and the output.

    q.(U c) = (q U).c for the key's up-projection U, and likewise for the value (DeepSeek-V2, section 2.1.2).
    """
    q_input = x
    if spec.q_rank:
        q_latent = add_bias(project("BTD,QD->BTQ", x, params["q_down"]), params.get("q_down_bias"))
        q_input = norm(params["q_norm"], q_latent, spec.norm)
    q = project("BTD,HhD->BTHh", q_input, params["q_up" if spec.q_rank else "q"])
    down = add_bias(project("BTD,CD->BTC", x, params["kv_down"]), params.get("kv_down_bias"))
    latent = norm(params["kv_norm"], down[..., : spec.kv_rank], spec.norm)
    key_lanes = rope(down[:, :, None, spec.kv_rank :], positions, spec.rope, context)
    query_lanes = rope(q[..., spec.nope_dim :], positions, spec.rope, context)
    absorbed = project("BTHh,HhC->BTHC", q[..., : spec.nope_dim], params["k_up"])
    queries = jnp.concatenate([absorbed, query_lanes], axis=-1)
    if spec.query_scaling:
        queries = scale_queries(queries, positions, spec.query_scaling)
    kv = KV(jnp.concatenate([latent[:, :, None, :], key_lanes], axis=-1), None)
    plain = AttentionSpec(spec.num_heads, 1, spec.kv_rank + spec.rope_dim, rope=None, scale=spec.softmax_scale)
    mixed = attend_seen(plain, queries, positions, Shared(past, kv), None)[..., : spec.kv_rank]
    values = project("BTHC,HhC->BTHh", mixed, params["v_up"])
    return add_bias(project("BTHh,DHh->BTD", values, params["o"]), params.get("o_bias")), kv


def norm_heads(params: dict[str, Any], heads: jax.Array, name: str, spec: AttentionSpec) -> jax.Array:
    """Queries or keys [B,T,H,h], normalised per head or over all heads."""
    assert spec.qk_norm
    return norm(params.get(name, {}), heads, spec.qk_norm, axes=2 if spec.qk_norm_over == "full" else 1)


def scale_queries(q: jax.Array, positions: jax.Array, scaling: QueryScaling) -> jax.Array:
    """q [B,T,H,h] times 1 + beta * log(1 + floor((position + shift) / original))."""
    steps = jnp.floor((positions + scaling.shift).astype(jnp.float32) / scaling.original)
    factor = 1.0 + scaling.beta * jnp.log1p(steps)
    return (q.astype(jnp.float32) * factor[:, :, None, None]).astype(q.dtype)


def parts_of(seen: Shared, positions: jax.Array) -> list[Past]:
    """What the queries may look at: the past, if there is any, and the new keys and values."""
    past, here = cut_past(past_of(seen)), Past(seen.new, positions)
    return [here] if past is None else [past, here]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def attend_seen(
    spec: AttentionSpec, q: jax.Array, positions: jax.Array, seen: Shared, sinks: jax.Array | None
) -> jax.Array:
    """`attend` to all that is seen, by a kernel where one serves. Kernels have no gradient: it is that of `attend`."""
    mixed = cpu.attention(q, seen.new, seen.past.kv, positions[:, 0], spec, sinks) if seen.past else None
    if mixed is None:
        mixed = accelerator.attention(q, positions, seen, spec, sinks)
    return attend_plainly(spec, q, positions, seen, sinks) if mixed is None else mixed


def attend_plainly(
    spec: AttentionSpec, q: jax.Array, positions: jax.Array, seen: Shared, sinks: jax.Array | None
) -> jax.Array:
    """`attend` to all that is seen, on every backend."""
    return attend(q, positions, parts_of(seen, positions), spec, sinks)


@attend_seen.defjvp
def attend_seen_jvp(spec: AttentionSpec, primals: Any, tangents: Any) -> Any:
    return jax.jvp(functools.partial(attend_plainly, spec), primals, tangents)


def attend(
    q: jax.Array, positions: jax.Array, parts: list[Past], spec: AttentionSpec, sinks: jax.Array | None = None
) -> jax.Array:
    """Each query's mix of the values of all parts. q [B,T,H,h], sinks [H] -> [B,T,H,h]; softmax in float32."""
    batch, width, heads, head_dim = q.shape
    grouped = q.reshape(batch, width, spec.num_kv_heads, heads // spec.num_kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    scores = [score(grouped, part, positions, spec) for part in parts]
    highest = jnp.max(jnp.stack([jnp.max(s, axis=-1) for s in scores]), axis=0)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, spec.num_kv_heads, -1, 1)
        highest = jnp.maximum(highest, sink)
    weights = [jnp.exp(s - highest[..., None]) for s in scores]
    total = jnp.sum(jnp.stack([jnp.sum(w, axis=-1) for w in weights]), axis=0)
    if sinks is not None:
        total = total + jnp.exp(sink - highest)
    mixed = jnp.sum(jnp.stack([mix(w, part) for w, part in zip(weights, parts, strict=True)]), axis=0)
    mean = (mixed / total[..., None]).astype(q.dtype)
    return mean.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def score(q: jax.Array, part: Past, positions: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Scaled scores in float32, hidden where masked. q [B,K,G,T,h], keys [B,S,K,h] -> [B,K,G,T,S]."""
    k = jnp.swapaxes(part.kv.k, 1, 2).astype(q.dtype)
    # One product per key head, with all its queries as rows: several times as fast on a CPU as one per query head.
    rows = q.reshape(*q.shape[:2], -1, q.shape[-1])
    scores = jnp.einsum("BKTh,BKSh->BKTS", rows, k, preferred_element_type=jnp.float32) * spec.softmax_scale
    scores = scores.reshape(*q.shape[:-1], k.shape[2])
    if spec.softcap:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    if spec.alibi:
        scores = scores + alibi(positions, part.positions, spec)
    seen = visible(positions, part.positions, spec)
    return jnp.where(seen[:, None, None, :, :], scores, HIDDEN)


def alibi(queries: jax.Array, keys: jax.Array, spec: AttentionSpec) -> jax.Array:
    """What positions add to scaled scores. [B,T], [B,S] -> float32 [B,K,G,T,S]; T is 1 where queries do not count."""
    slopes = jnp.asarray(spec.alibi, jnp.float32).reshape(1, spec.num_kv_heads, -1, 1, 1)
    keys = keys[:, None, None, None, :].astype(jnp.float32)
    if spec.alibi_bfloat16:
        return bfloat16(bfloat16(slopes) * bfloat16(keys)) * spec.softmax_scale
    return slopes * (keys - queries[:, None, None, :, None].astype(jnp.float32))


def bfloat16(x: jax.Array) -> jax.Array:
    """float32 rounded to what bfloat16 can hold; casts to and fro may be optimised away."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def mix(weights: jax.Array, part: Past) -> jax.Array:
    """Values summed by weight, in float32: [B,K,G,T,S] -> [B,K,G,T,h]. Keys serve as values where there are none."""
    values = part.kv.k if part.kv.v is None else part.kv.v
    values = jnp.swapaxes(held(values, part.positions), 1, 2)
    rows = weights.reshape(*weights.shape[:2], -1, weights.shape[-1]).astype(values.dtype)
    mixed = jnp.einsum("BKTS,BKSh->BKTh", rows, values, preferred_element_type=jnp.float32)
    return mixed.reshape(*weights.shape[:-1], values.shape[-1])
