"""A mixture of experts: a router sends each token to a few FFNs and adds up what they make of it."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.config import MoESpec, RouterSpec
from jaxlm.ffn import activate, ffn
from jaxlm.linear import add_bias, project
from jaxlm.norm import norm
from jaxlm.quant import pick, widen


def moe(params: dict[str, Any], x: jax.Array, spec: MoESpec, router_input: jax.Array | None = None) -> jax.Array:
    """The chosen experts' outputs, summed by weight, plus the shared expert's. x [B,T,D] -> [B,T,D], same dtype.

    router_input: what the router sees, where that is not x.
    """
    tokens = x.reshape(-1, x.shape[-1])
    seen = tokens if router_input is None else router_input.reshape(tokens.shape)
    weights, chosen = route(params["router"], seen, spec)
    # A gather reads the chosen experts' weights once per token; beyond a few tokens that costs more than sorting.
    few = tokens.shape[0] * spec.top_k <= spec.num_experts
    mixed = (gathered_experts if few else sorted_experts)(params["experts"], tokens, weights, chosen, spec)
    if spec.shared:
        always = ffn(params["shared"], x, spec.shared).reshape(tokens.shape)
        if spec.shared_gate:
            gate = jax.nn.sigmoid(project("TD,OD->TO", tokens, params["shared_gate"], jnp.float32))
            always = (always.astype(jnp.float32) * gate).astype(x.dtype)
        mixed = mixed + always
    return mixed.reshape(x.shape)


def route(params: dict[str, Any], x: jax.Array, spec: MoESpec) -> tuple[jax.Array, jax.Array]:
    """Which experts work on each token and with what weight: x [T,D] -> (float32 [T,C], int32 [T,C]), C = top_k."""
    router = spec.router
    if router.norm:
        x = norm(params["norm"], x, router.norm) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
    logits = add_bias(project("TD,ED->TE", x, params["weight"], jnp.float32), params.get("bias"))
    scores = jax.nn.softmax(logits, axis=-1) if router.scoring == "softmax" else jax.nn.sigmoid(logits)
    ranked = scores + params["correction"].astype(jnp.float32)[None, :] if router.correction else scores
    _, chosen = jax.lax.top_k(within_groups(ranked, router), spec.top_k)
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if router.normalize:
        weights = weights / jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1e-20)
    if router.expert_scale:
        weights = weights * params["expert_scale"].astype(jnp.float32)[chosen]
    return weights * router.scale, chosen


def within_groups(scores: jax.Array, router: RouterSpec) -> jax.Array:
    """Scores [T,E] with -inf for the experts outside the best groups."""
    if router.groups == router.top_groups:
        return scores
    grouped = scores.reshape(scores.shape[0], router.groups, -1)
    best = jax.lax.top_k(grouped, 1 if router.group_score == "max" else 2)[0].sum(axis=-1)
    _, kept = jax.lax.top_k(best, router.top_groups)
    inside = jnp.any(kept[:, :, None] == jnp.arange(router.groups, dtype=kept.dtype)[None, None, :], axis=1)
    return jnp.where(inside[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


def gathered_experts(
    params: dict[str, Any], x: jax.Array, weights: jax.Array, chosen: jax.Array, spec: MoESpec
) -> jax.Array:
    """Each token with its own copy of its experts' weights. x [T,D], weights and chosen [T,C] -> [T,D]."""
    own = {name: pick(leaf, chosen) for name, leaf in params.items()}
    inputs = jnp.broadcast_to(x[:, None, :], (*chosen.shape, x.shape[-1]))
    if spec.scale_input:
        inputs, weights = inputs * weights[:, :, None].astype(x.dtype), jnp.ones_like(weights)
    up = add_bias(project("TCD,TCFD->TCF", inputs, own["up"]), own.get("up_bias"))
    gate = add_bias(project("TCD,TCFD->TCF", inputs, own["gate"]), own.get("gate_bias")) if spec.expert.gated else None
    down = add_bias(project("TCF,TCDF->TCD", activate(up, gate, own, spec.expert), own["down"]), own.get("down_bias"))
    return jnp.einsum("TCD,TC->TD", down.astype(jnp.float32), weights).astype(x.dtype)


def sorted_experts(
    params: dict[str, Any], x: jax.Array, weights: jax.Array, chosen: jax.Array, spec: MoESpec
) -> jax.Array:
    """Tokens sorted by expert, then one grouped product per matrix. x [T,D], weights and chosen [T,C] -> [T,D]."""
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    experts = chosen.reshape(-1)[order]
    sizes = jnp.bincount(experts, length=spec.num_experts).astype(jnp.int32)
    rows = order // spec.top_k
    inputs, scale = x[rows], weights.reshape(-1)[order][:, None]
    if spec.scale_input:
        inputs, scale = inputs * scale.astype(x.dtype), jnp.ones_like(scale)

    def grouped(values: jax.Array, name: str) -> jax.Array:
        weights = widen(params[name], x.dtype)
        product = jax.lax.ragged_dot_general(values, weights, sizes, GROUPED, preferred_element_type=jnp.float32)
        bias = params.get(f"{name}_bias")
        return add_bias(product.astype(x.dtype), None if bias is None else pick(bias, experts))

    inner = activate(grouped(inputs, "up"), grouped(inputs, "gate") if spec.expert.gated else None, {}, spec.expert)
    outputs = grouped(inner, "down").astype(jnp.float32) * scale
    return jax.ops.segment_sum(outputs, rows, x.shape[0]).astype(x.dtype)


# values [M,D] by weights [E,F,D], the rows of `values` in E runs.
GROUPED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
