"""The generation loop: prefill in chunks, then steps on the device that end when every row is done.

`decode_loop` runs as many steps as it is asked for: many for a plain generation, one for a stream, a few between two
looks at stop strings. Its shapes come from a short ladder of sizes, so that no prompt length, setting, seed or number
of new tokens compiles anything new once a size has been used.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxlm import cpu
from jaxlm.cache import KVCache, grow, init_cache
from jaxlm.config import ModelConfig
from jaxlm.model import extend, lm_head, with_precision
from jaxlm.params import Params
from jaxlm.sample import penalise_repeats, sample

CHUNKS = (16, 32, 64, 128, 256, 512)  # Widths of a prefill chunk: the largest, then the least that holds the rest.
LEAST_SLOTS = 256  # The smallest cache; each larger one doubles.
LEAST_ROOM = 128  # Slots left free for new tokens when a generation starts.
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

    token int32 [B]; count [B] of ids chosen; status [B]; seen bool [B,V]: ids of the prompt and of the answer.
    """

    cache: KVCache
    token: jax.Array
    count: jax.Array
    status: jax.Array
    seen: jax.Array


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
    rows = jnp.arange(token.shape[0], dtype=jnp.int32)
    return LoopState(
        cache=state.cache,
        token=jnp.where(running, token, state.token),
        count=count,
        status=jnp.where(running, status, state.status),
        seen=state.seen.at[rows, token].set(True, mode="drop"),
    )


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


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
@with_precision
def decode_loop(
    params: Params, state: LoopState, settings: Settings, steps: jax.Array, config: ModelConfig
) -> tuple[LoopState, jax.Array]:
    """At most `steps` decode steps, fewer when all rows are done -> (state, the chosen ids [B,MOST_STEPS]).

    Each step processes the last chosen id of every running row, which writes its keys and values, and chooses the next.
    """
    def go_on(carry: tuple[LoopState, jax.Array, jax.Array]) -> jax.Array:
        state, _, step = carry
        return (step < steps) & jnp.any(state.status == RUNNING)

    def step_once(carry: tuple[LoopState, jax.Array, jax.Array]) -> tuple[LoopState, jax.Array, jax.Array]:
        state, chosen, step = carry
        running = (state.status == RUNNING).astype(jnp.int32)
        x, cache = extend(params, state.token[:, None], state.cache, config, running)
        state = choose(lm_head(params, x[:, 0], config), replace(state, cache=cache), settings)
        return state, jax.lax.dynamic_update_slice(chosen, state.token[:, None], (0, step)), step + 1

    chosen = jnp.zeros((state.token.shape[0], MOST_STEPS), jnp.int32)
    state, chosen, _ = jax.lax.while_loop(go_on, step_once, (state, chosen, jnp.int32(0)))
    return state, chosen


def start(params: Params, config: ModelConfig, prompts: list[list[int]], settings: Settings, slots: int) -> LoopState:
    """Prefill the prompts, right-padded, chunk by chunk, and choose each row's first id."""
    seen = np.zeros((len(prompts), config.vocab_size), bool)
    for row, ids in enumerate(prompts):
        seen[row, ids] = True
    cache = init_cache(config, len(prompts), slots, cache_dtype(config))
    last = jnp.zeros((len(prompts), config.hidden_size), jnp.dtype(config.dtype))
    context = np.array([len(p) for p in prompts], np.int32)
    for done, width, read in chunk_plan(int(context.max()), slots):
        pieces = [p[done : done + width] for p in prompts]
        tokens = np.array([piece + [0] * (width - len(piece)) for piece in pieces], np.int32)
        counts = np.array([len(piece) for piece in pieces], np.int32)
        last, cache = prefill_chunk(params, tokens, counts, context, cache, last, config, read)
    return first_token(params, last, cache, seen, settings, config)


def cache_dtype(config: ModelConfig) -> str:
    """The config's, but float32 where XLA would widen and rewrite a whole 16-bit cache for every token."""
    return cpu.cache_dtype(config.dtype)


def chunk_plan(longest: int, slots: int) -> list[tuple[int, int, int]]:
    """(first token, width, slots of the cache to read) of each prefill chunk of a prompt."""
    plan, done = [], 0
    while done < longest:
        width = next((c for c in CHUNKS if c >= longest - done), CHUNKS[-1])
        plan.append((done, width, min(ladder(done, CHUNKS[-1]), slots) if done else 0))
        done += width
    return plan


def slots_for(longest: int) -> int:
    """The slots that a generation starts with."""
    return ladder(longest + LEAST_ROOM, LEAST_SLOTS)


def warm_shapes(max_len: int) -> dict[int, set[tuple[int, int]]]:
    """Every cache size that rows of up to `max_len` tokens meet, with the (width, read) of the chunks met there."""
    shapes: dict[int, set[tuple[int, int]]] = {}
    for longest in range(1, max_len):
        slots = slots_for(longest)
        shapes.setdefault(slots, set()).update((width, read) for _, width, read in chunk_plan(longest, slots))
    return {slots: chunks for slots, chunks in shapes.items() if slots < 2 * max_len or slots == LEAST_SLOTS}


def ladder(needed: int, least: int) -> int:
    """The first size of least, 2 least, 4 least, ... that holds `needed`."""
    size = least
    while size < needed:
        size *= 2
    return size


def token_chunks(
    params: Params, config: ModelConfig, prompts: list[list[int]], settings: Settings, steps: int
) -> Iterator[tuple[list[list[int]], np.ndarray]]:
    """New ids per row, at most `steps` at a time, with each row's status, until every row is done.

    The cache doubles when the longest row has filled it. A row is REFUSED when its logits leave nothing to choose.
    """
    longest = max(len(p) for p in prompts)
    slots = slots_for(longest)
    state = start(params, config, prompts, settings, slots)
    status, made = np.asarray(state.status), np.asarray(state.count)
    yield [[token][:count] for token, count in zip(np.asarray(state.token).tolist(), made, strict=True)], status
    written = longest
    while (status == RUNNING).any():
        if written == slots:
            slots *= 2
            state = replace(state, cache=grow(state.cache, config, slots))
        room = min(steps, MOST_STEPS, slots - written)
        state, chosen = decode_loop(params, state, settings, jnp.int32(room), config)
        status, before, made = np.asarray(state.status), made, np.asarray(state.count)
        ids, new = np.asarray(chosen), made - before
        yield [ids[row, : new[row]].tolist() for row in range(len(prompts))], status
        written += room
