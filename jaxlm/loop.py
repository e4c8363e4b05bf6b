"""The generation loop: prefill in chunks, then steps on the device that end when every row is done.

`decode_loop` runs as many steps as it is asked for: many for a plain generation, one for a stream, a few between two
looks at stop strings. Its shapes come from a short ladder (`sizes`), so that no prompt length, setting, seed or number
of new tokens compiles anything new once a size has been used.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxlm import cpu
from jaxlm.cache import KVCache, grow, init_cache
from jaxlm.config import ModelConfig
from jaxlm.model import extend, lm_head, with_precision
from jaxlm.params import Params
from jaxlm.reuse import PrefixStore, keep_rows, restore_rows
from jaxlm.sample import penalise_repeats, sample
from jaxlm.sizes import chunk_plan, slots_for

MOST_STEPS = 256  # Steps of one call of the loop.
RUNNING, STOP, LENGTH, REFUSED = range(4)


@struct.dataclass
class Settings:
    """How each row chooses: float or int arrays [B], the row's key [B], its token limit [B], and what ends it."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    keys: jax.Array
    max_new_tokens: jax.Array
    eos_ids: jax.Array
    allowed: jax.Array


@struct.dataclass
class LoopState:
    """Between two steps: the last id chosen per row is not in the cache yet.

    token int32 [B]; count [B] of ids chosen; status [B]; seen bool [B,V]: ids of the prompt and of the answer; guess:
    what further tokens are guessed from, if they are.
    """

    cache: KVCache
    token: jax.Array
    count: jax.Array
    status: jax.Array
    seen: jax.Array
    guess: Any = None


def choose(logits: jax.Array, state: LoopState, settings: Settings) -> LoopState:
    """Pick the next id of each running row and decide whether the row goes on. Finished rows stay as they are."""
    logits = jnp.where(settings.allowed[None, :], logits, -jnp.inf)
    penalised = penalise_repeats(logits, state.seen, settings.repetition_penalty)
    keys = jax.vmap(jax.random.fold_in)(settings.keys, state.count)
    token = sample(
        penalised, keys, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p,
        min_p=settings.min_p,
    )  # fmt: skip
    running = state.status == RUNNING
    count = state.count + (running & (token >= 0)).astype(jnp.int32)
    ended = jnp.any(token[:, None] == settings.eos_ids[None, :], axis=1)
    status = jnp.where(count >= settings.max_new_tokens, LENGTH, RUNNING)
    status = jnp.where(token < 0, REFUSED, jnp.where(ended, STOP, status))
    token = jnp.where(running, token, state.token)
    rows = jnp.arange(token.shape[0], dtype=jnp.int32)
    return replace(
        state, token=token, count=count, status=jnp.where(running, status, state.status),
        seen=state.seen.at[rows, token].set(True, mode="drop"),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("config", "read"), donate_argnames=("cache", "last"))
@with_precision
def prefill_chunk(
    params: Params,
    tokens: jax.Array,
    counts: jax.Array,
    context: jax.Array,
    cache: KVCache,
    last: jax.Array,
    config: ModelConfig,
    read: int,
) -> tuple[jax.Array, KVCache]:
    """Carry each row on by its first `counts` [B] tokens; last [B,D] keeps each row's latest hidden state.

    context [B] is the length of each row's whole prompt. Only the first `read` slots of the cache are looked at; they
    must hold all that was written.
    """
    x, cache = extend(params, tokens, cache, config, counts, read, context)
    newest = jnp.take_along_axis(x, (counts - 1)[:, None, None], axis=1, mode="clip")[:, 0]
    return jnp.where((counts > 0)[:, None], newest, last), cache


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("cache",))
@with_precision
def first_token(
    params: Params, last: jax.Array, cache: KVCache, seen: jax.Array, settings: Settings, config: ModelConfig
) -> LoopState:
    """Choose the first id of each row from its last hidden state [B,D]."""
    zeros = jnp.zeros(last.shape[:1], jnp.int32)
    state = LoopState(cache, zeros, zeros, zeros, seen)
    return choose(lm_head(params, last, config), state, settings)


def decode_once(params: Params, state: LoopState, settings: Settings, config: ModelConfig) -> LoopState:
    """Process the last chosen id of every running row, which writes its keys and values, and choose the next."""
    running = (state.status == RUNNING).astype(jnp.int32)
    x, cache = extend(params, state.token[:, None], state.cache, config, running)
    return choose(lm_head(params, x[:, 0], config), replace(state, cache=cache), settings)


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
@with_precision
def decode_loop(
    params: Params, state: LoopState, settings: Settings, steps: jax.Array, config: ModelConfig
) -> tuple[LoopState, jax.Array]:
    """At most `steps` decode steps, fewer when all rows are done -> (state, the chosen ids [B,MOST_STEPS])."""
    def go_on(carry: tuple[LoopState, jax.Array, jax.Array]) -> jax.Array:
        state, _, step = carry
        return (step < steps) & jnp.any(state.status == RUNNING)

    def step_once(carry: tuple[LoopState, jax.Array, jax.Array]) -> tuple[LoopState, jax.Array, jax.Array]:
        state, chosen, step = carry
        state = decode_once(params, state, settings, config)
        return state, jax.lax.dynamic_update_slice(chosen, state.token[:, None], (0, step)), step + 1

    chosen = jnp.zeros((state.token.shape[0], MOST_STEPS), jnp.int32)
    state, chosen, _ = jax.lax.while_loop(go_on, step_once, (state, chosen, jnp.int32(0)))
    return state, chosen


def prefill_rows(
    params: Params, config: ModelConfig, prompts: list[list[int]], slots: int, store: PrefixStore | None = None
) -> tuple[jax.Array, KVCache]:
    """Process the prompts, right-padded, chunk by chunk -> (each row's last hidden state [B,D], the cache).

    Each row starts after what the store has of it.
    """
    cache = init_cache(config, len(prompts), slots, cache_dtype(config))
    starts = [0] * len(prompts)
    if store is not None:
        cache, starts = restore_rows(store, params, config, prompts, cache)
    last = jnp.zeros((len(prompts), config.hidden_size), jnp.dtype(config.dtype))
    context = np.array([len(p) for p in prompts], np.int32)
    for done, width, read in chunk_plan(starts, context.tolist(), slots):
        pieces = [p[first + done : first + done + width] for p, first in zip(prompts, starts, strict=True)]
        tokens = np.array([piece + [0] * (width - len(piece)) for piece in pieces], np.int32)
        counts = np.array([len(piece) for piece in pieces], np.int32)
        last, cache = prefill_chunk(params, tokens, counts, context, cache, last, config, read)
    if store is not None and any(layer.attention.reach for layer in config.layers):
        # A ring cannot be cut back once the answer has run over it.
        keep_rows(store, params, config, dict(enumerate(prompts)), prompts, cache)
    return last, cache


def start(
    params: Params, config: ModelConfig, prompts: list[list[int]], settings: Settings, slots: int,
    store: PrefixStore | None = None,
) -> LoopState:  # fmt: skip
    """Prefill the prompts and choose each row's first id."""
    seen = np.zeros((len(prompts), config.vocab_size), bool)
    for row, ids in enumerate(prompts):
        seen[row, ids] = True
    last, cache = prefill_rows(params, config, prompts, slots, store)
    return first_token(params, last, cache, jax.device_put(seen), settings, config)


def cache_dtype(config: ModelConfig) -> str:
    """The config's, but float32 where XLA would widen and rewrite a whole 16-bit cache for every token."""
    return cpu.cache_dtype(config.dtype)


class Decoder(Protocol):
    """A way to decode: how rows start, go on, get more room, and are kept for other prompts."""

    def start(
        self, prompts: list[list[int]], settings: Settings, slots: int, store: PrefixStore | None
    ) -> LoopState: ...

    def advance(
        self, state: LoopState, settings: Settings, steps: int, room: int
    ) -> tuple[LoopState, jax.Array]:
        """At most `steps` steps and `room` new ids a row -> (state, each row's new ids [B,MOST_STEPS])."""

    def grow(self, state: LoopState, slots: int) -> LoopState: ...

    def keep(
        self, store: PrefixStore, rows: dict[int, list[int]], prompts: list[list[int]], state: LoopState
    ) -> None: ...


@dataclass(frozen=True)
class PlainDecoder:
    """One token per row and step."""

    params: Params = field(repr=False)
    config: ModelConfig

    def start(
        self, prompts: list[list[int]], settings: Settings, slots: int, store: PrefixStore | None
    ) -> LoopState:
        return start(self.params, self.config, prompts, settings, slots, store)

    def advance(self, state: LoopState, settings: Settings, steps: int, room: int) -> tuple[LoopState, jax.Array]:
        return decode_loop(self.params, state, settings, jnp.int32(min(steps, room)), self.config)

    def grow(self, state: LoopState, slots: int) -> LoopState:
        return replace(state, cache=grow(state.cache, self.config, slots))

    def keep(
        self, store: PrefixStore, rows: dict[int, list[int]], prompts: list[list[int]], state: LoopState
    ) -> None:
        keep_rows(store, self.params, self.config, rows, prompts, state.cache)


def token_chunks(
    decoder: Decoder, prompts: list[list[int]], settings: Settings, steps: int, store: PrefixStore | None = None
) -> Iterator[tuple[list[list[int]], np.ndarray]]:
    """New ids per row, of at most `steps` steps, with each row's status, until every row is done.

    The cache doubles when the longest row has filled it. A row is REFUSED when its logits leave nothing to choose.
    With a store, rows start from it, and are kept in it at the end, or when the caller has seen enough.
    """
    slots = slots_for(max(len(p) for p in prompts))
    state = decoder.start(prompts, settings, slots, store)
    status, made = np.asarray(state.status), np.asarray(state.count)
    new = [[token][:count] for token, count in zip(np.asarray(state.token).tolist(), made, strict=True)]
    rows = [ids + more for ids, more in zip(prompts, new, strict=True)]
    try:
        yield new, status
        while (status == RUNNING).any():
            longest = max(len(ids) for ids, code in zip(rows, status, strict=True) if code == RUNNING)
            if longest > slots:  # The last id of a row is not in the cache yet.
                slots *= 2
                state = decoder.grow(state, slots)
            state, chosen = decoder.advance(state, settings, steps, min(MOST_STEPS, slots + 1 - longest))
            status, before, made = np.asarray(state.status), made, np.asarray(state.count)
            new = [ids[:count] for ids, count in zip(np.asarray(chosen).tolist(), made - before, strict=True)]
            for ids, more in zip(rows, new, strict=True):
                ids += more
            yield new, status
    except GeneratorExit:  # The caller has seen enough.
        pass
    if store is not None:
        good = {row: ids for row, ids in enumerate(rows) if status[row] != REFUSED}
        decoder.keep(store, good, prompts, state)
