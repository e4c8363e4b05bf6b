"""Kernels behind the attention seam: gradients, and equality with the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxlm
from jaxlm import cpu
from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig

WIDE = AttentionSpec(4, 2, 64)
NARROW = AttentionSpec(4, 2, 64, window=4, softcap=5.0, sinks=True)


def two_steps(params: dict, cache: jaxlm.KVCache, config: ModelConfig) -> jax.Array:
    """A number that depends on every logit of two decode steps, the second of which looks at what the first wrote."""
    first, cache = jaxlm.decode_step(params, jnp.array([3, 5]), cache, config)
    second, _ = jaxlm.decode_step(params, jnp.array([1, 2]), cache, config)
    return jnp.sum(jnp.sin(first)) + jnp.sum(jnp.cos(second))


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_decode_steps_have_the_plain_gradient_with_kernels(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    if cpu.kernels() is None:
        pytest.skip("jaxlm-cpu is not installed")
    config = ModelConfig(64, 128, (LayerSpec(WIDE, FFNSpec(256)), LayerSpec(NARROW, FFNSpec(256))))
    params = tiny.random_params(config, 1)
    cache = jaxlm.init_cache(config, 2, 16)
    _, cache = jaxlm.prefill(params, tiny.random_tokens((2, 6), 1, 64), cache, config, np.array([6, 3]))

    def gradient() -> list[np.ndarray]:
        loss = lambda p: two_steps(p, cache, config)  # noqa: E731
        if mode == "reverse":
            return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.grad(loss)(params))]
        return [np.asarray(a) for a in jax.jvp(loss, (params,), (tiny.random_params(config, 2),))]

    with_kernels = gradient()
    monkeypatch.setattr(cpu, "kernels", lambda: None)
    jax.clear_caches()
    for found, expected in zip(with_kernels, gradient(), strict=True):
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
