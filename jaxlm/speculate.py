"""Speculative decoding: guessed tokens go through the model together, and those that it would have chosen stay.

A guess is checked by choosing. At each position the model chooses as in plain decoding, under the same settings and
with the same key, and the next position counts if the guess there was that choice. So the answer is the plain one for
the same seed, greedy or sampled, whatever the guesses are (up to rounding, as several tokens go through at once): they
only decide how many tokens a step brings. For a guess that owes nothing to chance this is the rule of Leviathan et al.
2023: it stays with the probability that the model gives it, and else the choice is a draw from the rest. A draft model
chooses with the key, hence the noise, that the model will use; with distributions that differ by d (total variation)
the two agree with a probability of at least (1 - d) / (1 + d) (Daliri et al. 2024).

Guesses come from the row itself (`look_up`: what followed when its last tokens were there before; Saxena 2023) or from
a smaller model (`ask_draft`). Keys and values are written once it is known how many tokens stay: nothing is undone.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxlm.cache import KVCache, grow, rolled_back, write
from jaxlm.config import ModelConfig
from jaxlm.loop import MOST_STEPS, RUNNING, LoopState, PlainDecoder, Settings, choose, decode_once, prefill_rows
from jaxlm.model import extend, lm_head, look_ahead, with_precision
from jaxlm.params import Params
from jaxlm.reuse import PrefixStore, keep_rows
from jaxlm.rope import regime
from jaxlm.sample import choosable

WAITING = -1  # The status of a row that has got all that this step brings it.
LONGEST_MATCH = 4  # How many last ids are looked for at most in what came before,
SHORTEST_MATCH = 2  # and at least.


@struct.dataclass
class Draft:
    """A draft model's cache, and the ids that it has not seen yet: the first `counts` [B] of pending int32 [B,T]."""

    cache: KVCache
    pending: jax.Array
    counts: jax.Array


@struct.dataclass
class Guess:
    """Between two steps. source: the ids int32 [B,S] of the tokens in the cache, slot by slot, or a `Draft`.

    alone bool [B]: the row's next step goes without guesses.
    """

    source: Any
    alone: jax.Array


def look_up(ids: jax.Array, lengths: jax.Array, token: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """What followed where the row's last ids stood before: of the longest matches the latest.

    ids int32 [B,S], the first `lengths` [B] of which are the row's, and token [B], which comes after them
    -> (guesses [B,count], how many there are: all or none [B]). Where the end is reached, what follows is repeated.
    """
    rows, places = jnp.arange(ids.shape[0], dtype=jnp.int32), jnp.arange(ids.shape[1] + 1, dtype=jnp.int32)[None, :]
    ids = jnp.pad(ids, ((0, 0), (0, 1))).at[rows, lengths].set(token)
    same, run = places < lengths[:, None], jnp.zeros_like(ids)
    for back in range(LONGEST_MATCH):
        wanted = jnp.take_along_axis(ids, lengths[:, None] - back, axis=1, mode="clip")
        same &= (places >= back) & (jnp.roll(ids, back, axis=1) == wanted)
        run += same.astype(jnp.int32)
    score = jnp.where(run >= SHORTEST_MATCH, run * places.shape[1] + places, -1)
    at = jnp.argmax(score, axis=1).astype(jnp.int32)[:, None]
    found = jnp.take_along_axis(score, at, axis=1)[:, 0] >= 0
    ahead = jnp.arange(count, dtype=jnp.int32)[None, :] % jnp.maximum(lengths[:, None] - at, 1)
    return jnp.take_along_axis(ids, at + 1 + ahead, axis=1, mode="clip"), jnp.where(found, count, 0)


def ask_draft(
    params: Params | None, config: ModelConfig, draft: Draft, state: LoopState, settings: Settings, count: int
) -> tuple[jax.Array, jax.Array, Draft]:
    """Let the draft model go on for `count` tokens, choosing as the model will.

    -> (guesses [B,count], how many of a row's are meant [B], the draft, which has seen what was pending and no guess).
    """
    assert params is not None
    x, cache = extend(params, draft.pending, draft.cache, config, draft.counts)
    last = jnp.take_along_axis(x, (draft.counts - 1)[:, None, None], axis=1, mode="clip")[:, 0]
    ahead = choose(lm_head(params, last, config), replace(state, cache=cache, guess=None), settings)
    first = ahead.token

    def more(ahead: LoopState, _: None) -> tuple[LoopState, jax.Array]:
        ahead = decode_once(params, ahead, settings, config)
        return ahead, ahead.token

    ahead, others = jax.lax.scan(more, ahead, length=count - 1)
    guesses = jnp.concatenate([first[None], others]).T
    return guesses, ahead.count - state.count, replace(draft, cache=rolled_back(cache, ahead.cache, config))


def append(lists: jax.Array, lengths: jax.Array, more: jax.Array, counts: jax.Array) -> jax.Array:
    """Rows of ids [B,S], `lengths` [B] of them taken, each with the first `counts` [B] of `more` [B,T] put next."""
    rows = jnp.arange(lists.shape[0], dtype=jnp.int32)[:, None]
    index = jnp.arange(more.shape[1], dtype=jnp.int32)[None, :]
    places = jnp.where(index < counts[:, None], lengths[:, None] + index, lists.shape[1])
    return lists.at[rows, places].set(more, mode="drop")


def same_frequencies(config: ModelConfig, context: jax.Array, count: int) -> jax.Array:
    """How many of the next `count` tokens get the RoPE frequencies of a row of `context` [B] tokens: int32 [B]."""
    ahead = context[:, None] + jnp.arange(1, count + 1, dtype=jnp.int32)[None, :]
    same = jnp.ones_like(ahead)
    for rope in dict.fromkeys(layer.attention.rope for layer in config.layers):
        if rope:
            same &= (regime(rope, ahead) == regime(rope, context)[:, None]).astype(jnp.int32)
    return jnp.sum(jnp.cumprod(same, axis=1), axis=1)


def verify_all(
    params: Params, tokens: jax.Array, cache: KVCache, config: ModelConfig, counts: jax.Array
) -> tuple[jax.Array, Any]:
    """Logits [B,T,V] at each row's first `counts` [B] of tokens [B,T], and their keys and values for `write`."""
    x, new, _ = look_ahead(params, tokens, cache, config, counts)
    return lm_head(params, x, config), new


def verify_some(
    params: Params, tokens: jax.Array, cache: KVCache, config: ModelConfig, counts: jax.Array
) -> tuple[jax.Array, Any]:
    """The same, at the cost of a plain step where no row has a guess."""
    def narrow() -> tuple[jax.Array, Any]:
        logits, new = verify_all(params, tokens[:, :1], cache, config, counts)
        more = tokens.shape[1] - 1
        padded = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, 0), (0, more), (0, 0), (0, 0))), new)
        return jnp.pad(logits, ((0, 0), (0, more), (0, 0))), padded

    return jax.lax.cond(jnp.any(counts > 1), lambda: verify_all(params, tokens, cache, config, counts), narrow)


def choose_on(
    logits: jax.Array, tokens: jax.Array, counts: jax.Array, state: LoopState, settings: Settings
) -> tuple[LoopState, jax.Array]:
    """Choose at one position after the other, as long as the choice is the guess that stands next.

    logits [B,T,V] at tokens [B,T], the first `counts` [B] of which were run -> (state, the choices [B,T]).
    A NaN of a guess can reach the positions before it. So logits that cannot be used end a row only at its last token;
    else the row waits, to find out in a step without guesses.
    """
    def go_on(carry: tuple[LoopState, jax.Array, jax.Array]) -> jax.Array:
        return (carry[2] < tokens.shape[1]) & jnp.any(carry[0].status == RUNNING)

    def one(carry: tuple[LoopState, jax.Array, jax.Array]) -> tuple[LoopState, jax.Array, jax.Array]:
        state, picked, i = carry
        here = jax.lax.dynamic_index_in_dim(logits, i, axis=1, keepdims=False)
        spoiled = (state.status == RUNNING) & (i + 1 < counts) & ~choosable(here)
        guess = replace(state.guess, alone=state.guess.alone | spoiled)
        state = replace(state, guess=guess, status=jnp.where(spoiled, WAITING, state.status))
        state = choose(here, state, settings)
        picked = jax.lax.dynamic_update_slice(picked, state.token[:, None], (0, i))
        following = jax.lax.dynamic_index_in_dim(tokens, i + 1, axis=1, keepdims=False)
        agreed = (i + 1 < counts) & (state.token == following)
        status = jnp.where((state.status == RUNNING) & ~agreed, WAITING, state.status)
        return replace(state, status=status), picked, i + 1

    state, picked, _ = jax.lax.while_loop(go_on, one, (state, jnp.zeros_like(tokens), jnp.int32(0)))
    return replace(state, status=jnp.where(state.status == WAITING, RUNNING, state.status)), picked


@functools.partial(jax.jit, static_argnames=("config", "draft_config", "count"), donate_argnames=("state",))
@with_precision
def speculative_loop(
    params: Params, draft_params: Params | None, state: LoopState, settings: Settings, steps: jax.Array,
    room: jax.Array, config: ModelConfig, draft_config: ModelConfig | None, count: int,
) -> tuple[LoopState, jax.Array]:  # fmt: skip
    """At most `steps` steps with `count` guesses each, fewer when all rows are done or one has got `room` new ids.

    -> (state, each row's new ids [B,MOST_STEPS]). Without a draft's config, guesses are looked up.
    """
    start = state.count
    index = jnp.arange(count + 1, dtype=jnp.int32)[None, :]

    def go_on(carry: tuple[LoopState, jax.Array, jax.Array]) -> jax.Array:
        state, _, step = carry
        running = state.status == RUNNING
        return (step < steps) & jnp.any(running) & ~jnp.any(running & (state.count - start >= room))

    def step_once(carry: tuple[LoopState, jax.Array, jax.Array]) -> tuple[LoopState, jax.Array, jax.Array]:
        state, chosen, step = carry
        guess, cache = state.guess, state.cache
        source: Any = guess.source
        if draft_config is None:
            guesses, found = look_up(source, cache.lengths, state.token, count)
        else:
            guesses, found, source = ask_draft(draft_params, draft_config, source, state, settings, count)
        left = jnp.minimum(settings.max_new_tokens - state.count, room - (state.count - start)) - 1
        allowed = jnp.minimum(left, same_frequencies(config, cache.lengths + 1, count))
        counts = 1 + jnp.where(guess.alone, 0, jnp.clip(allowed, 0, found))
        counts = jnp.where(state.status == RUNNING, counts, 0)
        tokens = jnp.concatenate([state.token[:, None], guesses], axis=1)
        tokens = jnp.where(index < counts[:, None], tokens, 0)
        verify = verify_some if draft_config is None else verify_all
        logits, new = verify(params, tokens, cache, config, counts)
        made = state.count
        state = replace(state, guess=replace(guess, alone=jnp.zeros_like(guess.alone)))
        state, picked = choose_on(logits, tokens, counts, state, settings)
        kept = state.count - made
        if draft_config is None:
            source = append(source, cache.lengths, tokens, kept)
        else:
            source = replace(source, pending=picked, counts=kept)
        state = replace(state, cache=write(cache, new, kept), guess=replace(state.guess, source=source))
        return state, append(chosen, made - start, picked, kept), step + 1

    chosen = jnp.zeros((start.shape[0], MOST_STEPS), jnp.int32)
    state, chosen, _ = jax.lax.while_loop(go_on, step_once, (state, chosen, jnp.int32(0)))
    return state, chosen


@dataclass(frozen=True)
class SpeculativeDecoder:
    """`count` guesses a step: looked up in the row itself, or made by the draft model."""

    model: PlainDecoder
    draft: PlainDecoder | None
    count: int

    def start(
        self, prompts: list[list[int]], settings: Settings, slots: int, store: PrefixStore | None
    ) -> LoopState:
        state = self.model.start(prompts, settings, slots, store)
        if self.draft is None:
            return self.with_guesses(state, prompts, slots, None)
        _, cache = prefill_rows(self.draft.params, self.draft.config, prompts, slots, store)
        return self.with_guesses(state, prompts, slots, cache)

    def with_guesses(
        self, state: LoopState, prompts: list[list[int]], slots: int, draft_cache: KVCache | None
    ) -> LoopState:
        """A state that has chosen its first tokens, with what further ones are guessed from."""
        if draft_cache is None:
            source: Any = jax.device_put(np.array([ids + [0] * (slots - len(ids)) for ids in prompts], np.int32))
        else:
            pending = np.zeros((len(prompts), self.count + 1), np.int32)
            pending[:, 0] = np.asarray(state.token)
            source = Draft(draft_cache, *jax.device_put((pending, np.ones(len(prompts), np.int32))))
        return replace(state, guess=Guess(source, jax.device_put(np.zeros(len(prompts), bool))))

    def advance(self, state: LoopState, settings: Settings, steps: int, room: int) -> tuple[LoopState, jax.Array]:
        draft_params, draft_config = (self.draft.params, self.draft.config) if self.draft else (None, None)
        return speculative_loop(
            self.model.params, draft_params, state, settings, jnp.int32(steps), jnp.int32(room), self.model.config,
            draft_config, self.count,
        )  # fmt: skip

    def grow(self, state: LoopState, slots: int) -> LoopState:
        source = state.guess.source
        if self.draft is None:
            source = jnp.pad(source, ((0, 0), (0, slots - source.shape[1])))
        else:
            source = replace(source, cache=grow(source.cache, self.draft.config, slots))
        return replace(self.model.grow(state, slots), guess=replace(state.guess, source=source))

    def keep(
        self, store: PrefixStore, rows: dict[int, list[int]], prompts: list[list[int]], state: LoopState
    ) -> None:
        self.model.keep(store, rows, prompts, state)
        if self.draft is not None:
            keep_rows(store, self.draft.params, self.draft.config, rows, prompts, state.guess.source.cache)
