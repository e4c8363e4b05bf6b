"""Kernels behind the attention seam: gradients, and equality with the plain formula."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxlm
from jaxlm import cpu
from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig


def test_decode_steps_have_the_plain_gradient_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    module = cpu.kernels()
    if module is None:
        pytest.skip("jaxlm-cpu is not installed")
    spec = AttentionSpec(4, 2, 64, window=64, softcap=5.0, sinks=True)
    config = ModelConfig(64, 64, (LayerSpec(spec, FFNSpec(64)),))
    params = tiny.random_params(config, 1)
    cache = jaxlm.init_cache(config, 2, 64)  # Large enough to stay in its stack, where the kernel reads it.
    _, cache = jaxlm.prefill(params, tiny.random_tokens((2, 6), 1, 64), cache, config, np.array([6, 3]))

    def gradient(config: ModelConfig) -> list[np.ndarray]:
        loss = lambda p, c: jnp.sum(jnp.sin(jaxlm.decode_step(p, jnp.array([3, 5]), c, config)[0]))  # noqa: E731
        return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params, cache))]

    calls = []
    counted = lambda *a, **k: calls.append(1) or module.decode_attention(*a, **k)  # noqa: E731
    monkeypatch.setattr(cpu, "kernels", lambda: SimpleNamespace(**{**vars(module), "decode_attention": counted}))
    with_kernels = gradient(config)
    assert calls
    monkeypatch.setattr(cpu, "kernels", lambda: None)
    # Another config, for what was traced with kernels is kept by config.
    for found, expected in zip(with_kernels, gradient(dataclasses.replace(config, max_positions=99)), strict=True):
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
