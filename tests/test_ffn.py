"""The feed-forward network against plain numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from jaxlm.config import FFNSpec
from jaxlm.ffn import activation, ffn


def draw(spec, seed=0):
    config = tiny.config(tiny.jaxlm.LayerSpec(tiny.layer().attention, spec))
    params = jax.tree.map(lambda a: a[0], tiny.random_params(config, seed)["segments"][0][0]["ffn"])
    return params, jnp.asarray(np.random.default_rng(seed).standard_normal((2, 3, 8)), jnp.float32)


def exact(params, x, spec):
    params = oracle.wide(params)
    return np.apply_along_axis(lambda row: oracle.ffn(params, row, spec), -1, np.asarray(x, np.float64))


@tiny.examples(20)
@given(tiny.ffns, st.integers(0, 99))
def test_equals_numpy(spec, seed):
    params, x = draw(spec, seed)
    found = ffn(params, x, spec)
    assert found.dtype == x.dtype and found.shape == x.shape
    np.testing.assert_allclose(found, exact(params, x, spec), rtol=1e-4, atol=1e-5)


def test_the_gate_is_the_half_that_is_activated():
    """With a gate of minus 50 the output is 0 whatever `up` says."""
    spec = FFNSpec(2)
    params = {"gate": jnp.full((2, 1), -50.0), "up": jnp.full((2, 1), 3.0), "down": jnp.ones((1, 2))}
    assert abs(float(ffn(params, jnp.ones((1, 1, 1)), spec)[0, 0, 0])) < 1e-15


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations_are_float32_inside(name):
    one = jnp.ones((1, 1), jnp.bfloat16)
    x = jnp.asarray(np.linspace(-9, 9, 400), jnp.bfloat16)
    found = ffn({"up": one, "down": one}, x[None, :, None], FFNSpec(1, name, gated=False)).ravel()
    assert found.dtype == jnp.bfloat16
    wide = oracle.activation(np.asarray(x, np.float64), name)
    np.testing.assert_allclose(np.asarray(found, np.float64), wide, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("x", [-3.0, -0.2, -0.05, 0.0, 0.4, 2.0])
def test_xielu_by_definition(x):
    weights = {"alpha_p": 0.7, "alpha_n": -0.4, "beta": 0.6, "eps": -0.1}
    soft_p, soft_n = (np.log1p(np.exp(weights[name])) for name in ("alpha_p", "alpha_n"))
    below = (np.expm1(min(x, weights["eps"])) - x) * (weights["beta"] + soft_n)
    params = {name: jnp.asarray([value], jnp.float32) for name, value in weights.items()}
    found = activation(jnp.float32(x), params, "xielu")
    np.testing.assert_allclose(found, (soft_p * x * x if x > 0 else below) + weights["beta"] * x, rtol=1e-5, atol=1e-6)


def test_under_vmap():
    spec = FFNSpec(5, "gelu", bias=True)
    models = [draw(spec, seed) for seed in (0, 1)]
    params, x = jax.tree.map(lambda *a: jnp.stack(a), *models)
    found = jax.vmap(lambda p, a: ffn(p, a, spec))(params, x)
    for i, (p, a) in enumerate(models):
        np.testing.assert_allclose(found[i], ffn(p, a, spec), rtol=1e-5, atol=1e-6)
