"""Rotary position embedding: angles in float32, from absolute positions."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.config import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)


def rope(x: jax.Array, positions: jax.Array, spec: RopeSpec, context: jax.Array | None = None) -> jax.Array:
    """Rotate each pair of lanes of each head by position * frequency.

    x [B,T,H,h] any float dtype, positions [B,T] int32 -> [B,T,H,h], same dtype. context int32 [B]: how long each row is
    in all, for scalings that depend on it; default the highest position plus one.
    """
    dims = spec.dims or x.shape[-1]
    if context is None:
        context = jnp.max(positions, axis=1) + 1
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies(spec, dims, context)[:, None, None, :]
    cos, sin = (attention_factor(spec) * turn for turn in (jnp.cos(angles), jnp.sin(angles)))
    turned, rest = x[..., :dims].astype(jnp.float32), x[..., dims:]
    if spec.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pairs = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        rotated = pairs.reshape(turned.shape)
    else:
        first, second = jnp.split(turned, 2, axis=-1)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1) if rest.shape[-1] else rotated.astype(x.dtype)


def attention_factor(spec: RopeSpec) -> float:
    """What cos and sin are multiplied by."""
    return getattr(spec.scaling, "attention_factor", 1.0)


def frequencies(spec: RopeSpec, dims: int, context: jax.Array) -> jax.Array:
    """Radians per position for each pair of lanes: theta ** (-2i/dims), then scaled. float32 [1 or B, dims/2]."""
    match spec.scaling:
        case LongRopeScaling(short_factors, long_factors, original):
            short, long = (jnp.asarray(_plain(spec, dims) / f, jnp.float32) for f in (short_factors, long_factors))
            return jnp.where((context > original)[:, None], long[None, :], short[None, :])
        case DynamicScaling(factor, original):
            length = jnp.maximum(context, original).astype(jnp.float32)
            growth = (factor * length / original - (factor - 1.0)) ** (dims / (dims - 2))
            powers = jnp.asarray(np.arange(0, dims, 2, dtype=np.float32) / dims)
            return (spec.theta * growth[:, None]) ** -powers[None, :]
    return jnp.asarray(inverse_frequencies(spec, dims))[None, :]


def regime(spec: RopeSpec, context: Any) -> Any:
    """A number per length in `context`, an integer array: lengths with the same number have the same `frequencies`."""
    match spec.scaling:
        case LongRopeScaling(original_max_positions=original):
            return (context > original).astype(np.int32)
        case DynamicScaling(original_max_positions=original):
            return context * (context > original).astype(np.int32)
    return context * 0


def inverse_frequencies(spec: RopeSpec, dims: int) -> np.ndarray:
    """`frequencies` where they do not depend on the context. float32 [dims/2]."""
    plain = _plain(spec, dims)
    match spec.scaling:
        case LinearScaling(factor):
            plain = plain / factor
        case FactorScaling(factors):
            plain = plain / np.asarray(factors)
        case Llama3Scaling():
            plain = _llama3(plain, spec.scaling)
        case YarnScaling():
            plain = _yarn(plain, spec.scaling, spec.theta, dims)
    return plain.astype(np.float32)


def _plain(spec: RopeSpec, dims: int) -> np.ndarray:
    pairs = np.arange(dims // 2)
    turning = pairs < (spec.angles or dims // 2)
    return np.where(turning, spec.theta ** -(2.0 * pairs / dims), 0.0)


def _llama3(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Keep what turns often within the original context, divide what hardly turns, blend between (Llama 3.1)."""
    turns = scaling.original_max_positions * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0) if span else turns >= scaling.low_freq_factor
    return keep * plain + (1 - keep) * plain / scaling.factor


def _yarn(plain: np.ndarray, scaling: YarnScaling, theta: float, dims: int) -> np.ndarray:
    """Keep the lanes that turn at least beta_fast times within the original context, divide those below beta_slow."""
    def lane(turns: float) -> float:
        return dims * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = lane(scaling.beta_fast), lane(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = (np.arange(dims // 2) - low) / max(high - low, 0.001)
    divide = np.clip(ramp, 0.0, 1.0)
    return divide * plain / scaling.factor + (1 - divide) * plain
