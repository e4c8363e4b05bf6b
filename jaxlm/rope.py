"""Rotary position embedding: angles in float32, from absolute positions."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.config import FactorScaling, LinearScaling, Llama3Scaling, RopeScaling, RopeSpec


def rope(x: jax.Array, positions: jax.Array, spec: RopeSpec) -> jax.Array:
    """Rotate lane i of each head against lane i + h/2 by position * frequency[i].

    x [B,T,H,h] any float dtype, positions [B,T] int32 -> [B,T,H,h], same dtype.
    """
    frequencies = jnp.asarray(inverse_frequencies(spec, x.shape[-1]))
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> np.ndarray:
    """Radians per position for each pair of lanes: theta ** (-2i/h), then scaled. float32 [h/2]."""
    frequencies = spec.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return scale_frequencies(frequencies, spec.scaling).astype(np.float32)


def scale_frequencies(frequencies: np.ndarray, scaling: RopeScaling | None) -> np.ndarray:
    match scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case FactorScaling(factors):
            return frequencies / np.asarray(factors)
        case Llama3Scaling():
            return _llama3(frequencies, scaling)


def _llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Keep what turns often within the original context, divide what hardly turns, blend between (Llama 3.1)."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(ramp, 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor
