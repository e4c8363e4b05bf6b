"""The state in which jaxlm's device loop is measured: every slot of the cache holds something, all rows are greedy."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxlm
from jaxlm.loop import LoopState, Settings, cache_dtype

ENDLESS = 2**30


def settings_for(config: jaxlm.ModelConfig, batch: int) -> Settings:
    """Greedy rows that no id and no limit ends."""
    def rows(value: Any, dtype: str) -> jax.Array:
        return jnp.full((batch,), value, dtype)

    return Settings(
        temperature=rows(0, "float32"), top_k=rows(0, "int32"), top_p=rows(1, "float32"), min_p=rows(0, "float32"),
        repetition_penalty=rows(1, "float32"), keys=jax.random.split(jax.random.key(0), batch),
        max_new_tokens=rows(ENDLESS, "int32"), eos_ids=jnp.full((1,), -2, jnp.int32),
        allowed=jnp.ones((config.vocab_size,), bool),
    )  # fmt: skip


def filled(config: jaxlm.ModelConfig, batch: int, length: int, slots: int) -> LoopState:
    """Rows that hold `length` tokens and are about to process another."""
    cache = jaxlm.init_cache(config, batch, slots, cache_dtype(config))
    layers = jax.tree.map(partial(jnp.full_like, fill_value=0.01), cache.layers)
    seen = jnp.zeros((batch, config.vocab_size), bool)
    # Given away to the loop: no two may be one buffer.
    token, count, status, lengths = (jnp.full((batch,), value, jnp.int32) for value in (1, 0, 0, length))
    return LoopState(jaxlm.KVCache(layers, lengths), token, count, status, seen)


def again(state: LoopState, length: int) -> LoopState:
    """The same rows, holding `length` tokens again."""
    batch = state.token.shape[0]
    count, status, lengths = (jnp.full((batch,), value, jnp.int32) for value in (0, 0, length))
    return LoopState(jaxlm.KVCache(state.cache.layers, lengths), state.token, count, status, state.seen)
