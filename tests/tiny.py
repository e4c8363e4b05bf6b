"""Tiny models for tests: a strategy over all kinds of config, parameters with nothing at its default, jitted functions.

The fixed configs are for tests that run many examples on few shapes, since compiling takes most of the time.
"""

import contextlib
import functools
import os

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import jaxlm
from jaxlm.config import FactorScaling, LinearScaling, Llama3Scaling, ModelConfig
from jaxlm.params import abstract_params

VOCAB = 13
forward = jax.jit(jaxlm.forward, static_argnums=2)
prefill = jax.jit(jaxlm.prefill, static_argnums=3)
decode_step = jax.jit(jaxlm.decode_step, static_argnums=3)


def layer(window=0, heads=4, kv_heads=2, head_dim=6, inner=10, **changes) -> jaxlm.LayerSpec:
    """A gated pre-norm layer whose heads do not add up to the model's width."""
    attention = jaxlm.AttentionSpec(heads, kv_heads, head_dim, window=window)
    return jaxlm.LayerSpec(attention, jaxlm.FFNSpec(inner), **changes)


def config(*layers: jaxlm.LayerSpec, **changes) -> ModelConfig:
    return ModelConfig(**({"vocab_size": VOCAB, "hidden_size": 8, "layers": layers or (layer(),)} | changes))


BIASED = jaxlm.LayerSpec(
    jaxlm.AttentionSpec(3, 1, 5, rope=None, qkv_bias=True, out_bias=True, scale=0.7),
    jaxlm.FFNSpec(9, "gelu", gated=False, bias=True),
    jaxlm.NormSpec("layer", eps=1e-3, bias=True),
    post_norm=True,
)
FULL = config(layer(), layer())
MIXED = config(layer(4), layer(4), layer(), layer(4), layer(4), layer(), layer(3))
BIASES = config(BIASED, BIASED, tie_embeddings=True, final_norm=jaxlm.NormSpec("layer", bias=True))
WINDOWED = config(layer(4), layer(4))
ALTERNATE = config(layer(4), layer(), layer(4), layer())
# Mechanisms that the oracle does not know: for comparisons of the model with itself.
_latent = jaxlm.config.LatentAttentionSpec(4, 6, 4, 2, 5, jaxlm.RopeSpec(), jaxlm.NormSpec())
_chunked = jaxlm.AttentionSpec(4, 2, 6, chunk=4, sinks=True, softcap=5.0, qk_norm=jaxlm.NormSpec())
_experts = jaxlm.config.MoESpec(4, 2, jaxlm.FFNSpec(5), shared=jaxlm.FFNSpec(3))
OTHERS = config(
    jaxlm.LayerSpec(_latent, _experts),
    jaxlm.LayerSpec(_chunked, jaxlm.FFNSpec(6), parallel=True, shared_norm=True),
    jaxlm.LayerSpec(jaxlm.AttentionSpec(4, 2, 6, rope=None, alibi=(0.5, 0.25, 0.1, 0.05)), jaxlm.FFNSpec(6)),
    positions=jaxlm.config.LearnedPositions(64),
    max_positions=64,
)


def examples(count: int) -> hypothesis.settings:
    """That many examples, ten times as many in the profile that explores."""
    exploring = os.environ.get("HYPOTHESIS_PROFILE") == "explore"
    return hypothesis.settings(max_examples=10 * count if exploring else count)


def random_params(config: ModelConfig, seed: int = 0) -> jaxlm.params.Params:
    """Matrices that keep the size of their input, norm weights away from 1 and biases away from 0."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name, noise = path[-1].key, rng.standard_normal(leaf.shape)
        if name == "scale":
            value = np.where(noise < 0, noise - 0.4, noise + 0.4)
        elif name == "table":
            value = noise
        elif name.endswith("bias"):
            value = 0.5 * noise
        else:
            fan_in = leaf.shape[-1] * (leaf.shape[-2] if name == "o" else 1)
            value = 1.3 * noise * fan_in**-0.5
        return jnp.asarray(value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config))


def random_tokens(shape: tuple[int, ...], seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, shape, dtype=np.int32)


@contextlib.contextmanager
def count_compiles():
    """A list that gets an entry for each program compiled inside."""
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def filled(cache: jaxlm.KVCache, value: float) -> jaxlm.KVCache:
    """The cache with `value` in every slot and the same lengths."""
    return cache.replace(layers=jax.tree.map(lambda a: jnp.full_like(a, value), cache.layers))


def relative_error(found, expected) -> float:
    """The largest difference at any position, each relative to the largest logit of that position."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    error = np.abs(found - expected).max(-1) / np.abs(expected).max(-1)
    return float(error.max())  # NaN if there is a NaN, so that `<` fails.


def equal_trees(a, b) -> bool:
    """Same structure, dtypes and bits (NaN equals NaN)."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


norms = st.builds(
    jaxlm.NormSpec,
    kind=st.sampled_from(["rms", "layer"]),
    eps=st.sampled_from([1e-6, 1e-5, 1e-1]),
    bias=st.booleans(),
    unit_offset=st.booleans(),
)
activations = st.sampled_from(["silu", "gelu", "gelu_tanh", "relu"])
ffns = st.builds(jaxlm.FFNSpec, st.integers(4, 9), activations, gated=st.booleans(), bias=st.booleans())


@st.composite
def ropes(draw, head_dim: int) -> jaxlm.RopeSpec:
    factors = st.lists(st.floats(0.5, 40.0), min_size=head_dim // 2, max_size=head_dim // 2)
    scalings = st.one_of(
        st.none(),
        st.builds(LinearScaling, st.floats(0.5, 8.0)),
        st.builds(Llama3Scaling, st.floats(1.0, 32.0), st.floats(0.5, 2.0), st.floats(3.0, 8.0), st.integers(8, 200)),
        st.builds(FactorScaling, factors.map(tuple)),
    )
    return jaxlm.RopeSpec(draw(st.sampled_from([100.0, 10000.0, 500000.0])), draw(scalings))


@st.composite
def attentions(draw) -> jaxlm.AttentionSpec:
    heads, kv_heads = draw(st.sampled_from([(1, 1), (3, 3), (4, 2), (8, 2), (3, 1), (6, 3)]))
    head_dim = draw(st.integers(3, 6))
    rope = draw(ropes(head_dim)) if head_dim % 2 == 0 else None
    return jaxlm.AttentionSpec(
        heads, kv_heads, head_dim, rope, draw(st.booleans()), draw(st.booleans()),
        window=draw(st.sampled_from([0, 0, 1, 2, 3, 5])), scale=draw(st.sampled_from([None, None, 0.25, 1.0])),
    )  # fmt: skip


@st.composite
def layers(draw) -> jaxlm.LayerSpec:
    pre, post = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
    return jaxlm.LayerSpec(draw(attentions()), draw(ffns), draw(norms), pre, post)


# Widths start where a norm of a random vector is well conditioned: that of a single number is only its sign.
@st.composite
def configs(draw, dtype: str = "float32") -> ModelConfig:
    """One or two kinds of layer in any order, so that units of several layers and several segments arise."""
    kinds = draw(st.lists(layers(), min_size=1, max_size=2))
    order = draw(st.lists(st.sampled_from(range(len(kinds))), min_size=1, max_size=5))
    return ModelConfig(
        draw(st.sampled_from([2, VOCAB])), draw(st.sampled_from([6, 7, 8])), tuple(kinds[i] for i in order),
        draw(norms), draw(st.booleans()), dtype=dtype,
    )  # fmt: skip


@functools.cache
def known(config: ModelConfig, width: int = 30, rows: int = 3):
    """(params, tokens [rows, width], logits at every position without a cache) of a fixed config."""
    params, tokens = random_params(config, 1), random_tokens((rows, width), 2)
    return params, tokens, np.asarray(forward(params, tokens, config))
