"""The blocks, and running them: a scan over each segment of the model, with or without a cache."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxlm import accelerator, cpu
from jaxlm.attention import Past, Shared, attention
from jaxlm.cache import KV
from jaxlm.config import LayerSpec, ModelConfig, MoESpec, Segment
from jaxlm.ffn import ffn
from jaxlm.layer_inputs import take_in
from jaxlm.moe import moe
from jaxlm.norm import norm
from jaxlm.params import Params
from jaxlm.quant import Layer, views


def block(
    params: Params,
    x: jax.Array,
    spec: LayerSpec,
    positions: jax.Array,
    past: Past | None = None,
    context: jax.Array | None = None,
    shared: Shared | None = None,
    layer_input: jax.Array | None = None,
) -> tuple[jax.Array, KV | None]:
    """x + attention, then x + ffn, with the norms before or after each that the layer has. [B,T,D] -> [B,T,D]."""
    def before(name: str, value: jax.Array) -> jax.Array:
        return norm(params.get(name, {}), value, spec.norm) if spec.pre_norm else value

    def after(name: str, value: jax.Array) -> jax.Array:
        value = norm(params.get(name, {}), value, spec.norm) if spec.post_norm else value
        return value if spec.residual_scale == 1.0 else value * jnp.asarray(spec.residual_scale, value.dtype)

    normed = before("attn_norm", x)
    attended, kv = attention(params["attn"], normed, spec.attention, positions, past, context, shared)
    branch = after("attn_post_norm", attended)
    seen = x if spec.parallel else x + branch
    if not spec.shared_norm:
        normed = before("ffn_norm", seen)
    if isinstance(spec.ffn, MoESpec):
        worked = moe(params["ffn"], normed, spec.ffn)
    else:
        worked = ffn(params["ffn"], normed, spec.ffn)
    if spec.beside:
        worked = with_experts(params["beside"], worked, seen, spec, spec.beside)
    x = x + branch + after("ffn_post_norm", worked)
    if spec.layer_input:
        assert layer_input is not None
        x = take_in(params["input"], x, layer_input, spec, spec.layer_input)
    return x * params["output_scale"][0].astype(x.dtype) if spec.output_scale else x, kv


def with_experts(params: Params, worked: jax.Array, x: jax.Array, spec: LayerSpec, experts: MoESpec) -> jax.Array:
    """norm(worked) + norm(experts(norm(x))), routed by x itself. All [B,T,D]."""
    worked = norm(params.get("ffn_post_norm", {}), worked, spec.norm)
    mixed = moe(params["experts"], norm(params.get("norm", {}), x, spec.norm), experts, router_input=x)
    return worked + norm(params.get("post_norm", {}), mixed, spec.norm)


def run_segment(
    params: Any,
    x: jax.Array,
    segment: Segment,
    positions: jax.Array,
    past: tuple[Past | None, ...] | None,
    context: jax.Array,
    inputs: jax.Array | None = None,
    shared: dict[str, Shared] | None = None,
    states: bool = False,
) -> tuple[jax.Array, Any, dict[str, Shared], Any]:
    """All repeats of a unit: a scan where parameters are stacked, a loop where they are a list (`unstack`).

    past[j] holds KV [R,B,S,K,h] and positions [B,S]; inputs [R,U,B,T,P] of the unit's U layers; shared: what earlier
    segments keep -> (x, the new KV [R,B,T,K,h] per layer of the unit, or None where there is no past, `shared` with
    what this segment keeps, and with `states` every layer's output [R,U,B,T,D], else None).
    """
    known = shared or {}
    labels = [spec.attention.kv_keep for spec in segment.unit]

    def unit(x: jax.Array, each: tuple[Any, Any, Any]) -> tuple[jax.Array, Any]:
        layers, cached, vectors = each
        new, here, outputs = [], dict(known), []
        for j, spec in enumerate(segment.unit):
            stored = past[j] if past else None
            seen = Past(cached[j], stored.positions) if stored else None
            source = here.get(spec.attention.kv_from)
            vector = None if vectors is None else vectors[j]
            x, kv = block(layers[j], x, spec, positions, seen, context, source, vector)
            if labels[j] and kv:
                here[labels[j]] = Shared(seen, kv)
            new.append(as_stored(kv, stored) if kv and stored else kv)
            outputs.append(x)
        kept = {label: here[label].new for label in labels if label}
        return x, (tuple(new) if past else None, kept, jnp.stack(outputs) if states else None)

    cached = tuple(p.kv if p else None for p in past) if past else None
    x, (new, kept, outputs) = repeat_unit(unit, x, params, cached, inputs, segment.repeat if past else 0)
    for label, kv in kept.items():  # A layer that keeps is never repeated: its repeat axis has length 1.
        before = past[labels.index(label)] if past else None
        seen = Past(jax.tree.map(lambda a: a[0], before.kv), before.positions) if before else None
        known = {**known, label: Shared(seen, jax.tree.map(lambda a: a[0], kv))}
    return x, new, known, outputs


def as_stored(kv: KV, past: Past) -> KV:
    """In the dtype in which they are stacked for the cache."""
    return jax.tree.map(lambda a, old: a.astype(cpu.stacked_dtype(old.dtype)), kv, past.kv)


def repeat_unit(unit: Any, x: jax.Array, params: Any, cached: Any, inputs: Any, repeat: int) -> tuple[jax.Array, Any]:
    """unit(x, (layers, cached, inputs)) for every repeat. With repeat > 0, layers may stay in their stacks."""
    if not isinstance(params, list) and repeat and (cpu.stacked(x.dtype) or accelerator.stacked(x.shape[1])):
        def from_stacks(x: jax.Array, each: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            number, vectors = each
            return unit(x, (views(params, number), jax.tree.map(lambda a: Layer(a, number), cached), vectors))

        return jax.lax.scan(from_stacks, x, (jnp.arange(repeat, dtype=jnp.int32), inputs))
    if not isinstance(params, list):
        return jax.lax.scan(unit, x, (params, cached, inputs))
    steps = []
    for i, layers in enumerate(params):
        x, made = unit(x, (layers, *jax.tree.map(lambda a, i=i: a[i], (cached, inputs))))
        steps.append(made)
    return x, jax.tree.map(lambda *a: jnp.stack(a), *steps)


def run_layers(
    params: Params,
    x: jax.Array,
    positions: jax.Array,
    context: jax.Array,
    config: ModelConfig,
    past: tuple[Any, ...] | None = None,
    inputs: jax.Array | None = None,
    states: bool = False,
) -> tuple[jax.Array, tuple[Any, ...], list[jax.Array]]:
    """Every segment in turn; inputs [L,B,T,P] where layers take any in.

    -> (x [B,T,D], the new KV per segment, and with `states` the outputs of each segment's layers [.,B,T,D]).
    """
    new, outputs, done = [], [], 0
    shared: dict[str, Shared] = {}
    for i, segment in enumerate(config.segments):
        size = segment.repeat * len(segment.unit)
        mine = None if inputs is None else inputs[done : done + size].reshape(segment.repeat, -1, *inputs.shape[1:])
        seen = past[i] if past else None
        layers = params["segments"][i]
        x, kv, shared, made = run_segment(layers, x, segment, positions, seen, context, mine, shared, states)
        new.append(kv)
        if states:
            outputs.append(made.reshape(size, *x.shape))
        done += size
    return x, tuple(new), outputs
