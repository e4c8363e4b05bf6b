"""One declaration per array: shapes, dtypes, axis names and first values agree with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given

import jaxlm
from jaxlm.params import abstract_params, declare, init_params, param_axes, unstack


def by_path(tree, **options):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, **options)}


@given(tiny.configs())
def test_shapes_and_axis_names_follow_the_config(config):
    shapes = {path: leaf.shape for path, leaf in by_path(abstract_params(config)).items()}
    axes = by_path(param_axes(config), is_leaf=lambda a: isinstance(a, tuple) and all(isinstance(n, str) for n in a))
    axes = {path: names for path, names in axes.items() if names}
    assert shapes.keys() == axes.keys()
    sizes = {"vocab": {config.vocab_size}, "embed": {config.hidden_size}}
    for path, shape in shapes.items():
        where = path.split("]")
        if "segments" in path:
            segment = config.segments[int(where[1][1:])]
            layer = segment.unit[int(where[2][1:])]
            a = layer.attention
            sizes |= {"heads": {a.num_heads}, "kv_heads": {a.num_kv_heads}, "head_dim": {a.head_dim}}
            sizes |= {"mlp": {layer.ffn.intermediate_size}, "layers": {segment.repeat}}
            assert axes[path][0] == "layers"
        assert len(shape) == len(axes[path])
        assert all(size in sizes[name] for name, size in zip(axes[path], shape, strict=True)), path
    tied = "['lm_head']['table']" not in shapes
    assert tied == config.tie_embeddings


@given(tiny.configs())
def test_exactly_the_arrays_that_the_specs_ask_for(config):
    for segment, unit in zip(config.segments, declare(config)["segments"], strict=True):
        for spec, layer in zip(segment.unit, unit, strict=True):
            norms = {n for on, n in ((spec.pre_norm, "norm"), (spec.post_norm, "post_norm")) if on}
            assert layer.keys() == {"attn", "ffn", *(f"{part}_{n}" for part in ("attn", "ffn") for n in norms)}
            qkv, out = spec.attention.qkv_bias, spec.attention.out_bias
            biases = {f"{n}_bias" for n in "qkv" if qkv} | ({"o_bias"} if out else set())
            assert layer["attn"].keys() == {"q", "k", "v", "o"} | biases
            names = {"up", "down"} | ({"gate"} if spec.ffn.gated else set())
            assert layer["ffn"].keys() == names | ({f"{n}_bias" for n in names} if spec.ffn.bias else set())
            for name in layer.keys() - {"attn", "ffn"}:
                assert layer[name].keys() == {"scale"} | ({"bias"} if spec.norm.bias else set())


@pytest.mark.parametrize(
    ("base", "dtype"),
    [(tiny.FULL, "float32"), (tiny.FULL, "bfloat16"), (tiny.BIASES, "float16")],
    ids=["float32", "bfloat16", "float16"],
)
def test_random_models_have_the_declared_shapes_and_dtype(base, dtype):
    config = jaxlm.ModelConfig(**{**{n: getattr(base, n) for n in base.__dataclass_fields__}, "dtype": dtype})
    params = init_params(config, jax.random.key(0))
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)
    assert shapes == abstract_params(config)
    for path, leaf in by_path(params).items():
        assert leaf.dtype == dtype
        if "scale" in path:
            assert (np.asarray(leaf) == 1).all()
        elif "bias" in path:
            assert (np.asarray(leaf) == 0).all()
        else:
            assert np.asarray(leaf, np.float32).std() > 0


def test_matrices_keep_the_size_of_their_input():
    config = tiny.config(tiny.layer(head_dim=32, inner=300), hidden_size=200, vocab_size=500)
    layer = init_params(config, jax.random.key(0))["segments"][0][0]
    for leaf, fan_in in ((layer["attn"]["q"], 200), (layer["attn"]["o"], 128), (layer["ffn"]["down"], 300)):
        assert abs(float(jnp.std(leaf)) * fan_in**0.5 - 1) < 0.05
        assert abs(float(jnp.mean(leaf))) < 4 * fan_in**-0.5 / leaf.size**0.5


def test_the_key_decides():
    first, again, other = (init_params(tiny.FULL, jax.random.key(seed)) for seed in (0, 0, 1))
    assert tiny.equal_trees(first, again)
    matrices = [(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True) if jnp.std(a) > 0]
    assert len(matrices) > 8 and all(not np.array_equal(a, b) for a, b in matrices)


def test_no_two_arrays_nor_layers_are_alike():
    params = unstack(init_params(tiny.FULL, jax.random.key(0)))
    seen = {np.asarray(a).tobytes() for a in jax.tree.leaves(params) if jnp.std(a) > 0}
    assert len(seen) == sum(1 for a in jax.tree.leaves(params) if jnp.std(a) > 0)


def test_another_array_does_not_change_the_rest():
    configs = (tiny.config(*tiny.FULL.layers, tie_embeddings=tie) for tie in (False, True))
    plain, tied = (init_params(config, jax.random.key(0)) for config in configs)
    del plain["lm_head"]
    assert tiny.equal_trees(plain, tied)


def test_unstack_gives_single_layers_in_order():
    params = tiny.random_params(tiny.MIXED)
    single = unstack(params)
    for segment, unit, layers in zip(tiny.MIXED.segments, params["segments"], single["segments"], strict=True):
        assert isinstance(layers, list) and len(layers) == segment.repeat
        for i, layer in enumerate(layers):
            assert tiny.equal_trees(layer, jax.tree.map(lambda a, i=i: a[i], unit))
    assert single["embed"] is params["embed"]


def test_random_models_give_finite_logits():
    config = tiny.config(*tiny.FULL.layers, dtype="bfloat16")
    logits = tiny.forward(init_params(config, jax.random.key(0)), tiny.random_tokens((1, 6)), config)
    assert np.isfinite(np.asarray(logits)).all() and np.asarray(logits).std() > 1e-3
