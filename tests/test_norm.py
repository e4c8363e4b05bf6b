"""Norms against plain numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from jaxlm.config import NormSpec
from jaxlm.norm import norm


def draw(width, seed, dtype="float32", size=1.0, shift=0.0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(size * (rng.standard_normal((2, 3, width)) + shift), dtype)
    params = {name: jnp.asarray(1.5 + rng.standard_normal(width), dtype) for name in ("scale", "bias")}
    return x, params


def expected(params, x, spec):
    params = oracle.wide(params)
    return np.apply_along_axis(lambda row: oracle.norm(params, row, spec), -1, np.asarray(x).astype(np.float64))


@given(tiny.norms, st.sampled_from([2, 7, 32]), st.integers(0, 99), st.sampled_from([1e-3, 1.0, 1e4]))
def test_equals_numpy(spec, width, seed, size):
    x, params = draw(width, seed, size=size, shift=0.5)
    params = params if spec.bias else {"scale": params["scale"]}
    found = norm(params, x, spec)
    assert found.dtype == x.dtype and found.shape == x.shape
    np.testing.assert_allclose(found, expected(params, x, spec), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_input_is_normalised_in_float32(kind, dtype):
    """Within two roundings of the exact value, although squares of 300 overflow float16."""
    x, params = draw(512, 0, dtype, size=300.0)
    found = norm(params, x, NormSpec(kind))
    assert found.dtype == dtype
    ulp = {"bfloat16": 2**-8, "float16": 2**-11}[dtype]
    exact = expected(params, x, NormSpec(kind))
    assert (np.abs(np.asarray(found, np.float64) - exact) <= 2.1 * ulp * np.abs(exact) + 1e-3 * ulp).all()


def test_layer_norm_of_a_far_mean_keeps_its_digits():
    x, params = draw(64, 0, shift=1000.0)
    found = norm(params, x, NormSpec("layer"))
    np.testing.assert_allclose(found, expected(params, x, NormSpec("layer")), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_zero_vector_without_eps_gives_zeros(kind):
    params = {"scale": jnp.full(8, 2.0)}
    found = jax.jit(norm, static_argnums=2)(params, jnp.zeros((1, 8)), NormSpec(kind, eps=0.0))
    assert np.array_equal(found, np.zeros((1, 8)))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_zero_vector_without_eps_has_finite_gradients(kind):
    params = {"scale": jnp.full(8, 2.0)}
    gradient = jax.grad(lambda x: jnp.sum(norm(params, x, NormSpec(kind, eps=0.0))))(jnp.zeros((1, 8)))
    assert np.isfinite(np.asarray(gradient)).all()


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_under_vmap(kind):
    x, params = draw(7, 0)
    found = jax.vmap(lambda row: norm(params, row, NormSpec(kind, bias=True)))(x)
    np.testing.assert_allclose(found, norm(params, x, NormSpec(kind, bias=True)), rtol=1e-6)
