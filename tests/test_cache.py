"""The cache's slots against a dictionary that remembers what was written where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

import jaxlm
from jaxlm.cache import KV, KVCache, capacity, init_cache, slot_positions, write, write_slots
from jaxlm.errors import RequestError


@given(st.integers(1, 7), st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_slots_hold_the_latest_position_that_maps_to_them(slots, lengths):
    found = np.asarray(slot_positions(jnp.asarray(lengths, jnp.int32), slots))
    for row, length in enumerate(lengths):
        held = {p % slots: p for p in range(length)}
        assert [p if p >= 0 else None for p in found[row]] == [held.get(s) for s in range(slots)]


@given(st.integers(1, 7), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6))
def test_writing_chunks_fills_each_row_in_order(slots, plan):
    """Value p + 1 is written for position p, -7 for padding; rings keep the last `slots`."""
    cache = KVCache(((KV(*[jnp.zeros((1, 2, slots, 1, 1))] * 2),),), jnp.zeros(2, jnp.int32))
    memory = [dict.fromkeys(range(slots), 0.0), dict.fromkeys(range(slots), 0.0)]
    lengths = [0, 0]
    for counts in plan:
        new = np.full((1, 2, 5, 1, 1), -7.0, np.float32)
        for row, count in enumerate(counts):
            for i in range(count):
                new[0, row, i] = memory[row][lengths[row] % slots] = lengths[row] + 1
                lengths[row] += 1
        before = np.asarray(cache.layers[0][0].k)
        after = write(cache, ((KV(jnp.asarray(new), jnp.asarray(-new)),),), jnp.asarray(counts, jnp.int32))
        assert np.array_equal(cache.layers[0][0].k, before)
        cache = after
        k, v = cache.layers[0][0]
        assert np.asarray(k)[0, :, :, 0, 0].tolist() == [[m[s] for s in range(slots)] for m in memory]
        assert np.array_equal(v, -k) and cache.lengths.tolist() == lengths


@given(st.integers(1, 7), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=4))
def test_no_slot_is_written_twice_in_one_call(slots, rows):
    """Of two writes to one place either may win, so a ring leaves out what it would drop at once."""
    lengths, counts = (jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True))
    found = np.asarray(write_slots(lengths, counts, 9, slots))
    for slots_of_row, (length, count) in zip(found, rows, strict=True):
        first = max(0, count - slots)
        expected = [(length + i) % slots if first <= i < count else slots for i in range(9)]
        assert slots_of_row.tolist() == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_writing_keeps_bits_and_dtype(dtype):
    """NaN, infinities, minus zero and the smallest number arrive as they are; a wider value is rounded once."""
    odd = [np.nan, np.inf, -np.inf, -0.0, float(jnp.finfo(dtype).smallest_subnormal), 1.2345]
    values = jnp.asarray(odd, dtype).reshape(1, 1, 6, 1, 1)
    cache = KVCache(((KV(*[jnp.zeros((1, 1, 8, 1, 1), dtype)] * 2),),), jnp.zeros(1, jnp.int32))
    after = write(cache, ((KV(values, values.astype("float32")),),), jnp.asarray([6], jnp.int32))
    bits = f"uint{8 * jnp.dtype(dtype).itemsize}"
    for found in after.layers[0][0]:
        assert found.dtype == dtype
    k = after.layers[0][0].k[:, :, :6]
    assert np.array_equal(np.asarray(k).view(bits), np.asarray(values).view(bits))
    assert np.array_equal(after.layers[0][0].v[:, :, :6], values, equal_nan=True)


def test_shapes_follow_the_config():
    cache = init_cache(tiny.MIXED, 3, 9)
    layers = [kv for unit in cache.layers for kv in unit]
    specs = [spec for segment in tiny.MIXED.segments for spec in segment.unit]
    repeats = [segment.repeat for segment in tiny.MIXED.segments for _ in segment.unit]
    for kv, spec, repeat in zip(layers, specs, repeats, strict=True):
        assert kv.k.shape == kv.v.shape == (repeat, 3, spec.attention.window or 9, 2, 6)
        assert kv.k.dtype == "float32" and not np.asarray(kv.k).any()
    assert cache.lengths.tolist() == [0, 0, 0] and cache.lengths.dtype == "int32"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_that_of_the_config_unless_given(dtype):
    config = tiny.config(dtype=dtype)
    assert {a.dtype.name for a in jax.tree.leaves(init_cache(config, 1, 4).layers)} == {dtype}
    assert {a.dtype.name for a in jax.tree.leaves(init_cache(config, 1, 4, "bfloat16").layers)} == {"bfloat16"}


@pytest.mark.parametrize(
    ("config", "max_len", "limit"),
    [(tiny.FULL, 9, 9), (tiny.MIXED, 9, 9), (tiny.WINDOWED, 9, None), (tiny.WINDOWED, 4, None), (tiny.WINDOWED, 3, 3)],
)
def test_capacity_is_that_of_the_layers_that_cannot_wrap(config, max_len, limit):
    assert capacity(init_cache(config, 1, max_len), config) == limit


@pytest.mark.parametrize("bad", [0, -1, 1.5, "8", None, np.nan])
def test_sizes_are_checked(bad):
    with pytest.raises(RequestError, match="batch"):
        init_cache(tiny.FULL, bad, 4)
    with pytest.raises(RequestError, match="max_len"):
        init_cache(tiny.FULL, 4, bad)


def test_a_cache_is_a_pytree_of_arrays_alone():
    cache = init_cache(tiny.MIXED, 2, 4)
    leaves, structure = jax.tree.flatten(cache)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert tiny.equal_trees(structure.unflatten(leaves), cache)
    assert isinstance(jax.jit(lambda c: c)(cache), jaxlm.KVCache)
