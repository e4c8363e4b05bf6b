"""Prefix reuse: keys and values of earlier rows, kept so that a prompt that begins like one of them is not run anew.

A row of the cache is a value like any other: what a `PrefixStore` holds are copies of rows, with the ids behind them. A
prompt takes the row that shares the most tokens with it, cut back to the shared ones, and prefills the rest. At least
one token is always left, for there to be logits.

A result may differ from one without a store by rounding only: the same tokens went through in other portions.
"""

import functools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.cache import KVCache, can_cut_back
from jaxlm.config import ModelConfig
from jaxlm.errors import RequestError
from jaxlm.params import Params
from jaxlm.rope import regime
from jaxlm.sizes import ladder

LEAST_SHARED = 16  # Fewer tokens are run sooner than their keys and values are copied.


@dataclass(frozen=True, eq=False)
class Owner:
    """Whose keys and values they are: of these very arrays, under this config, at the frequencies of this length."""

    params: tuple[weakref.ref, ...]
    config: ModelConfig
    regimes: tuple[int, ...]

    def is_same(self, other: "Owner") -> bool:
        if len(self.params) != len(other.params) or (self.config, self.regimes) != (other.config, other.regimes):
            return False
        return all(a() is not None and a() is b() for a, b in zip(self.params, other.params, strict=True))

    def is_gone(self) -> bool:
        return any(a() is None for a in self.params)


def owner_of(params: Params, config: ModelConfig, length: int) -> Owner:
    """The owner of a row whose prompt has `length` tokens; it does not keep the parameters alive.

    Where frequencies depend on the length (LongRoPE, dynamic NTK), only prompts that get the same ones may share.
    """
    ropes = dict.fromkeys(layer.attention.rope for layer in config.layers)
    regimes = tuple(int(regime(rope, np.int32(length))) for rope in ropes if rope)
    return Owner(tuple(weakref.ref(leaf) for leaf in jax.tree.leaves(params)), config, regimes)


@dataclass(frozen=True, eq=False)
class Entry:
    """One row: ids int32 [n] and, layer by layer, what the cache held of them, KV [R,S,K,h]."""

    owner: Owner
    ids: np.ndarray
    layers: Any = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.layers))

    def serves(self, owner: Owner, ids: np.ndarray) -> int:
        """How many of the first ids it can stand for; 0 where it is of no use."""
        if not self.owner.is_same(owner):
            return 0
        shorter = min(len(self.ids), len(ids))
        differ = np.flatnonzero(self.ids[:shorter] != ids[:shorter])
        shared = int(differ[0]) if differ.size else shorter
        return shared if can_cut_back(owner.config, len(self.ids), shared) else 0

    def covers(self, owner: Owner, ids: np.ndarray) -> bool:
        """Whether a row of these ids would be of no more use: the very same prompt comes again without its last id."""
        return all(self.serves(owner, some) == len(some) for some in (ids, ids[:-1]))


class PrefixStore:
    """Rows of past generations, for `generate` and `stream` to start from; made and passed on by the caller.

    It holds at most `max_bytes` of keys and values, on the device, and drops what was used least recently; a row that
    alone has more is not kept. It may serve several models and threads: a row is found by the very parameters and the
    config that made it, and no longer than those parameters exist. Raises RequestError for max_bytes below 0.
    """

    def __init__(self, max_bytes: int = 1 << 30):
        if not isinstance(max_bytes, (int, np.integer)) or isinstance(max_bytes, bool) or max_bytes < 0:
            raise RequestError(f"PrefixStore: max_bytes is {max_bytes!r}; allowed: an integer of at least 0")
        self.max_bytes = int(max_bytes)
        self._entries: list[Entry] = []  # The least recently used first.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held."""
        return sum(entry.nbytes for entry in self._entries)

    def clear(self) -> None:
        """Forget every row."""
        with self._lock:
            self._entries = []

    def find(self, owner: Owner, ids: Sequence[int]) -> tuple[int, Any]:
        """(how many of the ids, not counting the last, a row stands for, its layers); (0, None) if none does."""
        wanted = np.asarray(ids[:-1], np.int32)
        with self._lock:
            counts = [entry.serves(owner, wanted) for entry in self._entries]
            shared = max(counts, default=0)
            if shared < LEAST_SHARED:
                return 0, None
            entry = self._entries[counts.index(shared)]
            self._use(entry)
        return shared, entry.layers

    def covers(self, owner: Owner, ids: Sequence[int]) -> bool:
        """Whether some row stands for all of the ids, which then need not be kept once more."""
        wanted = np.asarray(ids, np.int32)
        with self._lock:
            for entry in self._entries:
                if entry.covers(owner, wanted):
                    self._use(entry)
                    return True
        return False

    def keep(self, owner: Owner, ids: Sequence[int], layers: Any) -> None:
        """Add a row in place of those that it stands for, and drop old ones until all fit."""
        new = Entry(owner, np.asarray(ids, np.int32), layers)
        with self._lock:
            kept = [e for e in self._entries if not e.owner.is_gone() and not new.covers(e.owner, e.ids)]
            if new.nbytes <= self.max_bytes:
                kept.append(new)
            while sum(entry.nbytes for entry in kept) > self.max_bytes:
                kept.pop(0)
            self._entries = kept

    def _use(self, entry: Entry) -> None:
        self._entries.remove(entry)
        self._entries.append(entry)


@functools.partial(jax.jit, static_argnames="size")
def take_row(cache: KVCache, row: jax.Array, size: int) -> Any:
    """The first `size` slots of one row, layer by layer: KV [R,S,K,h], copies."""
    def take(a: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(a[:, :, :size], row, axis=1, keepdims=False)

    return jax.tree.map(take, cache.layers)


@functools.partial(jax.jit, donate_argnames="cache")
def put_row(cache: KVCache, layers: Any, row: jax.Array, length: jax.Array) -> KVCache:
    """The cache with a row that was taken from another, cut back to `length` tokens.

    A full layer may have been longer: only its first slots matter. A ring that has wrapped has the same size here.
    """
    def put(a: jax.Array, kept: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(a, kept[:, None, : a.shape[2]], (0, row, 0, 0, 0))

    return KVCache(jax.tree.map(put, cache.layers, layers), cache.lengths.at[row].set(length))


def restore_rows(
    store: PrefixStore, params: Params, config: ModelConfig, prompts: list[list[int]], cache: KVCache
) -> tuple[KVCache, list[int]]:
    """An empty cache filled with what the store has of each prompt; -> (cache, how many tokens of each that is)."""
    starts = []
    for row, ids in enumerate(prompts):
        shared, layers = store.find(owner_of(params, config, len(ids)), ids)
        if shared:
            cache = put_row(cache, layers, jnp.int32(row), jnp.int32(shared))
        starts.append(shared)
    return cache, starts


def keep_rows(
    store: PrefixStore, params: Params, config: ModelConfig, rows: dict[int, list[int]], prompts: list[list[int]],
    cache: KVCache,
) -> None:  # fmt: skip
    """Keep rows of the cache, by number, with their ids: prompt and answer, as far as the cache holds them."""
    lengths = np.asarray(cache.lengths).tolist()
    for row, ids in rows.items():
        owner, held = owner_of(params, config, len(prompts[row])), ids[: lengths[row]]
        if not store.covers(owner, held):
            store.keep(owner, held, take_row(cache, jnp.int32(row), ladder(len(held))))
