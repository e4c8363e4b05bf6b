"""Compiling ahead: every program that generation can need up to a length, before someone waits for it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.cache import KVCache, init_cache
from jaxlm.config import ModelConfig
from jaxlm.errors import RequestError
from jaxlm.generate import DRAFT_TOKENS, Model, check_request, lay_out, make_decoder
from jaxlm.loop import Decoder, LoopState, cache_dtype, first_token, prefill_chunk
from jaxlm.reuse import put_row, take_row
from jaxlm.sizes import warm_shapes
from jaxlm.speculate import SpeculativeDecoder


def warmup(
    model: Model, *, batch: int = 1, max_len: int = 1024, reuse: bool = False, draft: Any = None,
    draft_tokens: int = DRAFT_TOKENS, say: Callable[[str], None] = lambda line: None,
) -> None:  # fmt: skip
    """Compile what `generate` and `stream` run for `batch` prompts, each up to `max_len` tokens with its answer.

    draft, draft_tokens: as they will be given; reuse: whether there will be a store.
    With JAX's persistent compilation cache on (the command line turns it on), later processes find the programs there.
    Raises RequestError for a batch or max_len below 1, a max_len beyond the model's context, or a draft that does not
    fit.
    """
    limit = model.config.max_positions
    if not isinstance(batch, int) or batch < 1:
        raise RequestError(f"batch is {batch!r}; allowed: an integer of at least 1")
    if not isinstance(max_len, int) or not 1 < max_len <= limit:
        raise RequestError(f"max_len is {max_len!r}; allowed: 2 to the model's context of {limit}")
    decoder = make_decoder(model, draft, draft_tokens)
    models = [model, draft] if isinstance(draft, Model) else [model]
    sizes = warm_shapes(max_len, reuse)
    for slots, chunks in sizes.items():
        say(f"compiling for {slots} tokens of context")
        (last, cache), *drafts = [warm_prefill(each, batch, slots, sorted(chunks)) for each in models]
        state = warm_steps(model, decoder, slots, last, cache, drafts[0][1] if drafts else None)
        if 2 * slots in sizes:
            decoder.grow(state, 2 * slots)
    for each in models if reuse else []:
        warm_copies(each.config, batch, sorted(sizes))


def warm_prefill(model: Model, batch: int, slots: int, chunks: list[tuple[int, int]]) -> tuple[jax.Array, KVCache]:
    """Run every chunk of one cache size on empty rows; -> what prefill gives."""
    context = np.ones((batch,), np.int32)
    none = np.zeros((batch,), np.int32)
    cache = init_cache(model.config, batch, slots, cache_dtype(model.config))
    last = jnp.zeros((batch, model.config.hidden_size), jnp.dtype(model.config.dtype))
    for width, read in chunks:
        tokens = np.zeros((batch, width), np.int32)
        last, cache = prefill_chunk(model.params, tokens, none, context, cache, last, model.config, read)
    return last, cache


def warm_steps(
    model: Model, decoder: Decoder, slots: int, last: jax.Array, cache: KVCache, draft_cache: KVCache | None
) -> LoopState:
    """Choose first tokens and run the device loop, for no steps."""
    batch = last.shape[0]
    settings = lay_out(model, [[0]] * batch, check_request(batch))
    seen = np.zeros((batch, model.config.vocab_size), bool)
    state = first_token(model.params, last, cache, seen, settings, model.config)
    if isinstance(decoder, SpeculativeDecoder):
        state = decoder.with_guesses(state, [[0]] * batch, slots, draft_cache)
    state, _ = decoder.advance(state, settings, 0, 0)
    return jax.block_until_ready(state)


def warm_copies(config: ModelConfig, batch: int, sizes: list[int]) -> None:
    """Copy rows of every size out of and into caches of every size."""
    zero = jnp.int32(0)
    caches = {slots: init_cache(config, batch, slots, cache_dtype(config)) for slots in sizes}
    for size in sizes:
        for slots in sizes:
            if size <= slots:
                row = take_row(caches[slots], zero, size)
        for slots in sizes:
            caches[slots] = put_row(caches[slots], row, zero, zero)
