"""Attention against loops over heads and keys in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

import jaxlm
from jaxlm.attention import Past, attention
from jaxlm.cache import KV


def draw(spec, seed=0, tokens=6, dtype="float32"):
    config = tiny.config(jaxlm.LayerSpec(spec, jaxlm.FFNSpec(4)), dtype=dtype)
    params = jax.tree.map(lambda a: a[0], tiny.random_params(config, seed)["segments"][0][0]["attn"])
    return params, jnp.asarray(np.random.default_rng(seed).standard_normal((2, tokens, 8)), dtype)


def exact(params, x, spec):
    params = oracle.wide(params)
    return np.stack([oracle.attention(params, row, spec) for row in np.asarray(x).astype(np.float64)])


@tiny.examples(8)
@given(tiny.attentions(), st.integers(0, 99))
def test_equals_loops_in_numpy(spec, seed):
    params, x = draw(spec, seed)
    found, kv = jax.jit(attention, static_argnums=2)(params, x, spec)
    assert found.dtype == x.dtype and kv.k.shape == kv.v.shape == (2, 6, spec.num_kv_heads, spec.head_dim)
    np.testing.assert_allclose(found, exact(params, x, spec), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("window", [0, 2])
def test_positions_default_to_the_order_of_the_tokens(window):
    spec = jaxlm.AttentionSpec(4, 2, 6, window=window)
    params, x = draw(spec)
    found = attention(params, x, spec, jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32)[None, :], (2, 6)))[0]
    assert np.array_equal(found, attention(params, x, spec)[0])


@pytest.mark.parametrize("window", [0, 3])
def test_the_past_may_lie_in_any_order_between_empty_slots(window):
    """Keys and values at shuffled slots, NaN in the empty ones: the result is that of one sequence."""
    spec = jaxlm.AttentionSpec(4, 2, 6, window=window)
    params, x = draw(spec)
    whole, kv = attention(params, x, spec)
    order = np.array([2, 9, 0, 3, 9, 1])  # Slot -> position; 9 is none.
    empty = (order == 9)[None, :, None, None]
    index = np.where(order == 9, 0, order)
    past_kv = KV(*(jnp.where(empty, jnp.nan, a[:, index]) for a in kv))
    slots = jnp.broadcast_to(jnp.asarray(np.where(order == 9, -1, order), jnp.int32)[None, :], (2, 6))
    positions = jnp.broadcast_to(jnp.asarray([4, 5], jnp.int32)[None, :], (2, 2))
    found, _ = attention(params, x[:, 4:], spec, positions, Past(past_kv, slots))
    np.testing.assert_allclose(found, whole[:, 4:], rtol=1e-4, atol=1e-5)


def test_a_row_that_sees_nothing_is_finite():
    spec = jaxlm.AttentionSpec(4, 2, 6)
    params, x = draw(spec)
    found, _ = attention(params, x, spec, jnp.full((2, 6), -1, jnp.int32))
    assert np.isfinite(np.asarray(found)).all()


def test_scores_and_softmax_of_bfloat16_are_float32():
    """Two keys whose scores are 234 and 235.83, the second of which bfloat16 would round to 236."""
    spec = jaxlm.AttentionSpec(1, 1, 1, rope=None, qkv_bias=True)
    params = {"q": 14.5, "k": 1.0, "v": 32.0, "o": 1.0}
    params = {name: jnp.full((1, 1, 1), value, jnp.bfloat16) for name, value in params.items()}
    params |= {f"{n}_bias": jnp.full((1, 1), {"v": -128.0}.get(n, 0.0), jnp.bfloat16) for n in "qkv"}
    found, kv = attention(params, jnp.asarray([[[4.0], [4.03125]]], jnp.bfloat16), spec)
    assert kv.v.ravel().tolist() == [0.0, 1.0]
    assert abs(float(found[0, 1, 0]) - 1 / (1 + np.exp(-58.5 * 0.03125))) < 0.004


def test_scores_too_large_for_float16_stay_finite():
    spec = jaxlm.AttentionSpec(1, 1, 2, rope=None, scale=1.0)
    params = {name: jnp.ones((1, 2, 1), jnp.float16) * 200 for name in ("q", "k")}
    params |= {"v": jnp.ones((1, 2, 1), jnp.float16), "o": jnp.ones((1, 1, 2), jnp.float16)}
    found, _ = attention(params, jnp.ones((1, 3, 1), jnp.float16), spec)
    assert np.array_equal(found, np.full((1, 3, 1), 2.0))  # q.k = 80000, above float16's 65504.


def test_under_vmap():
    spec = jaxlm.AttentionSpec(4, 2, 6, qkv_bias=True, window=3)
    models = [draw(spec, seed) for seed in (0, 1)]
    params, x = jax.tree.map(lambda *a: jnp.stack(a), *models)
    found, _ = jax.vmap(lambda p, a: attention(p, a, spec))(params, x)
    for i, (p, a) in enumerate(models):
        np.testing.assert_allclose(found[i], attention(p, a, spec)[0], rtol=1e-4, atol=1e-5)
