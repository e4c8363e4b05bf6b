"""Logits in two ways, for the plain tests (against stored logits) and the parity tests (against live ones)."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm import ModelConfig, decode_step, forward, init_cache, prefill
from jaxlm.params import Params


def logits_at_once(params: Params, tokens: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Of every position of one row. int32 [1,T] -> float32 [T,V]."""
    return np.asarray(jax.jit(forward, static_argnums=2)(params, tokens, config))[0]


def logits_in_steps(params: Params, tokens: np.ndarray, config: ModelConfig, split: int = 3) -> np.ndarray:
    """The same from position split - 1 on: two chunks of prefill, then one token at a time."""
    length = tokens.shape[1]
    cache = init_cache(config, 1, length)
    fill = jax.jit(prefill, static_argnums=3)
    step = jax.jit(decode_step, static_argnums=3)
    seen = []
    for chunk in (tokens[:, :split], tokens[:, split : 2 * split]):
        logits, cache = fill(params, jnp.asarray(chunk), cache, config)
        seen.append(logits)
    for i in range(2 * split, length):
        logits, cache = step(params, jnp.asarray(tokens[:, i]), cache, config)
        seen.append(logits)
    return np.concatenate(seen)


def kept_positions(length: int, split: int = 3) -> list[int]:
    """The positions whose logits `logits_in_steps` gives."""
    return [split - 1, *range(2 * split - 1, length)]
