"""Compiling ahead: every program that generation can need up to a length, before someone waits for it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.cache import grow, init_cache
from jaxlm.errors import RequestError
from jaxlm.generate import Model, make_settings
from jaxlm.loop import cache_dtype, decode_loop, first_token, prefill_chunk, warm_shapes


def warmup(
    model: Model, *, batch: int = 1, max_len: int = 1024, say: Callable[[str], None] = lambda line: None
) -> None:
    """Compile what `generate` and `stream` run for `batch` prompts, each up to `max_len` tokens with its answer.

    With JAX's persistent compilation cache on (the command line turns it on), later processes find the programs there.
    Raises RequestError for a batch or max_len below 1, or a max_len beyond the model's context.
    """
    limit = model.config.max_positions
    if not isinstance(batch, int) or batch < 1:
        raise RequestError(f"batch is {batch!r}; allowed: an integer of at least 1")
    if not isinstance(max_len, int) or not 1 < max_len <= limit:
        raise RequestError(f"max_len is {max_len!r}; allowed: 2 to the model's context of {limit}")
    sizes = warm_shapes(max_len)
    for slots, chunks in sizes.items():
        say(f"compiling for {slots} tokens of context")
        warm_size(model, batch, slots, sorted(chunks), 2 * slots in sizes)


def warm_size(model: Model, batch: int, slots: int, chunks: list[tuple[int, int]], grows: bool) -> None:
    """Run every program of one cache size on empty rows."""
    params, config = model.params, model.config
    settings = make_settings(model, [[0]] * batch, 1, 0, True)
    context = np.ones((batch,), np.int32)
    none = np.zeros((batch,), np.int32)
    cache = init_cache(config, batch, slots, cache_dtype(config))
    last = jnp.zeros((batch, config.hidden_size), jnp.dtype(config.dtype))
    for width, read in chunks:
        tokens = np.zeros((batch, width), np.int32)
        last, cache = prefill_chunk(params, tokens, none, context, cache, last, config, read)
    seen = np.zeros((batch, config.vocab_size), bool)
    state = first_token(params, last, cache, seen, settings, config)
    state, _ = decode_loop(params, state, settings, jnp.int32(0), config)
    if grows:
        grow(state.cache, config, 2 * slots)
    jax.block_until_ready(state)
