"""Rotary positions against complex numbers in float64, and the laws that make them positions."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from jaxlm.config import LinearScaling, Llama3Scaling, RopeSpec
from jaxlm.rope import inverse_frequencies, rope

heads = st.sampled_from([2, 6, 16])


@given(st.data(), heads, st.integers(0, 99), st.sampled_from([0, 7, 2000]))
def test_equals_complex_rotation(data, width, seed, start):
    spec = data.draw(tiny.ropes(width))
    x = np.random.default_rng(seed).standard_normal((2, 3, 2, width)).astype(np.float32)
    positions = np.array([[0, 1, 2], [5, 9, 3]], np.int32) + start
    found = rope(jnp.asarray(x), jnp.asarray(positions), spec)
    wide = x.astype(np.float64)
    exact = np.empty(x.shape)
    for b, t, h in np.ndindex(2, 3, 2):
        exact[b, t, h] = oracle.rope(wide[b, t, h], int(positions[b, t]), spec)
    # An angle of n radians has lost n * 2^-24 to rounding.
    np.testing.assert_allclose(found, exact, atol=1e-5 + 1e-6 * 2 * start)


@given(st.data(), heads, st.integers(0, 500))
def test_products_depend_on_distance_alone(data, width, shift):
    spec = data.draw(tiny.ropes(width))
    q, k = (jnp.asarray(np.random.default_rng(i).standard_normal((1, 1, 1, width)), jnp.float32) for i in (0, 1))

    def product(m, n):
        q_turned, k_turned = rope(q, jnp.full((1, 1), m), spec), rope(k, jnp.full((1, 1), n), spec)
        return float(jnp.sum(q_turned * k_turned))

    scale = float(jnp.linalg.norm(q.ravel()) * jnp.linalg.norm(k.ravel()))
    assert abs(product(9, 4) - product(9 + shift, 4 + shift)) < 5e-4 * scale
    assert abs(float(jnp.sum(rope(q, jnp.full((1, 1), shift), spec) ** 2)) / float(jnp.sum(q**2)) - 1) < 1e-4


def test_position_zero_is_left_alone():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 3, 8)), jnp.float32)
    assert np.array_equal(rope(x, jnp.zeros((1, 1), jnp.int32), RopeSpec()), x)


def test_llama3_scaling_has_three_regions():
    """With 8192 positions, factors 1 and 4: those that turn more than 4 times stay, less than once are divided by 8."""
    plain = inverse_frequencies(RopeSpec(500000.0), 128).astype(np.float64)
    scaled = inverse_frequencies(RopeSpec(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)), 128).astype(np.float64)
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_allclose(scaled[turns > 4], plain[turns > 4], rtol=1e-6)
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    between = (turns > 1) & (turns < 4)
    assert between.sum() > 3 and (turns > 4).any() and (turns < 1).any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_linear_scaling_is_interpolation():
    """Position 8 under factor 4 is position 2."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 1, 8)), jnp.float32)
    far = rope(x, jnp.full((1, 1), 8), RopeSpec(scaling=LinearScaling(4.0)))
    np.testing.assert_allclose(far, rope(x, jnp.full((1, 1), 2), RopeSpec()), atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_angles_are_float32_for_narrow_input(dtype):
    """At position 3001 a bfloat16 angle would be off by radians."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 2, 8)), dtype)
    found = rope(x, jnp.full((1, 1), 3001), RopeSpec())
    assert found.dtype == dtype
    exact = [oracle.rope(row, 3001, RopeSpec()) for row in np.asarray(x, np.float64)[0, 0]]
    np.testing.assert_allclose(np.asarray(found, np.float64)[0, 0], exact, atol=0.02)


def test_under_vmap():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, 3, 2, 8)), jnp.float32)
    positions = jnp.asarray([[[0, 1, 2]], [[7, 8, 9]]], jnp.int32)
    found = jax.vmap(lambda a, p: rope(a, p, RopeSpec()))(x, positions)
    for i in range(2):
        np.testing.assert_allclose(found[i], rope(x[i], positions[i], RopeSpec()), atol=1e-6)
