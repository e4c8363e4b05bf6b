"""The optional CPU kernels against plain numpy in float64: products with stored weights and attention."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm import cpu

jaxlm_cpu = pytest.importorskip("jaxlm_cpu", reason="the optional kernels are not installed (pip install ./kernels)")
if jax.default_backend() != "cpu":
    pytest.skip("the kernels run on the CPU backend only", allow_module_level=True)

FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]
EXAMPLES = 8 if os.environ.get("JAXLM_CPU_ISA") else 30
seeds = st.integers(0, 2**32 - 1)


def f64(a) -> np.ndarray:
    return np.asarray(a, np.float64)


def assert_product(y, x, w, rtol=2e-6):
    """y = x w^T up to rounding, measured against the sizes of what is summed."""
    x, w = f64(x), f64(w)
    assert y.dtype == jnp.float32
    size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(w, axis=1)[None] + 1e-30
    error = np.abs(f64(y) - x @ w.T) / size
    assert error.max() < rtol, error.max()


def random_q8(rng, shape, group, dtype=jnp.float16):
    values = rng.integers(-127, 128, shape).astype(np.int8)
    scales = jnp.asarray(rng.uniform(0.01, 1, (*shape[:-1], shape[-1] // group)), dtype)
    return jaxlm_cpu.Q8(jnp.asarray(values), scales), values * np.repeat(f64(scales), group, -1)


def random_q4(rng, shape, group, mins, dtype=jnp.float16):
    packed = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2)).astype(np.uint8)
    blocks = packed.reshape(*shape[:-1], -1, 16)
    q = np.concatenate([blocks & 15, blocks >> 4], axis=-1).reshape(shape)
    scales = jnp.asarray(rng.uniform(0.01, 1, (*shape[:-1], shape[-1] // group)), dtype)
    offsets = jnp.asarray(rng.normal(size=scales.shape), dtype) if mins else None
    wide = np.repeat(f64(scales), group, -1)
    w = wide * q + np.repeat(f64(offsets), group, -1) if mins else wide * (q - 8.0)
    return jaxlm_cpu.Q4(jnp.asarray(packed), scales, offsets), w


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=seeds, B=st.integers(1, 19), N=st.integers(1, 40), K=st.integers(1, 300), data=st.data())
def test_matvec_any_shape_and_dtype(seed, B, N, K, data):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(B, K)), data.draw(st.sampled_from(FLOATS)))
    w = jnp.asarray(rng.normal(size=(N, K)), data.draw(st.sampled_from(FLOATS)))
    assert_product(jaxlm_cpu.matvec(x, w), x, w)


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=seeds, B=st.integers(1, 19), N=st.integers(1, 40), blocks=st.integers(1, 20), data=st.data())
def test_quantised_products_are_exact(seed, B, N, blocks, data):
    rng = np.random.default_rng(seed)
    group = data.draw(st.sampled_from([32, 64, 128, 256]))
    x = jnp.asarray(rng.normal(size=(B, blocks * group)), data.draw(st.sampled_from(FLOATS[:2])))
    dtype = data.draw(st.sampled_from(FLOATS))
    node, w = random_q8(rng, (N, blocks * group), group, dtype)
    assert_product(jaxlm_cpu.matvec_q8(x, node), x, w)
    node, w = random_q4(rng, (N, blocks * group), group, data.draw(st.booleans()), dtype)
    assert_product(jaxlm_cpu.matvec_q4(x, node), x, w)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=seeds, B=st.integers(1, 5), N=st.integers(1, 7), K=st.sampled_from([32, 96, 4096, 4096 + 64]),
    dtype=st.sampled_from(FLOATS[:2]),
)  # fmt: skip
def test_many_rows_on_the_matrix_unit(seed, B, N, K, dtype):
    """bfloat16 products are exact and their sums float32; quantised weights are rounded to bfloat16 first."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(16 * B, K)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(2, 16 * N, K)), jnp.bfloat16)
    if not jaxlm_cpu.on_matrix_unit(x, [w]):
        assert not jaxlm_cpu.matrix_unit()
        with pytest.raises(ValueError, match="give bfloat16"):
            jaxlm_cpu.matvec(x, w, 1, dtype=jnp.bfloat16)
        return
    result_error = 0 if dtype == jnp.float32 else 2**-8
    group = 32 if K % 64 else 64
    (q8, wide8), (q4, wide4) = random_q8(rng, w.shape, group), random_q4(rng, w.shape, group, bool(B % 2))
    for product, weight, wide in (
        (jaxlm_cpu.matvec, w, w), (jaxlm_cpu.matvec_q8, q8, wide8), (jaxlm_cpu.matvec_q4, q4, wide4)
    ):  # fmt: skip
        rounded = f64(jnp.asarray(wide[1], jnp.bfloat16))
        y = product(x, weight, 1, dtype=dtype)
        assert y.dtype == dtype
        size = np.linalg.norm(f64(x), axis=1)[:, None] * np.linalg.norm(rounded, axis=1)[None]
        expected = f64(x) @ rounded.T
        assert (np.abs(f64(y) - expected) <= 2e-6 * size + result_error * np.abs(expected)).all()


@pytest.mark.parametrize("B", [1, 2, 3, 5, 8, 11])
@pytest.mark.parametrize("mins", [False, True])
def test_int8_activations_are_close(B, mins):
    """Within what rounding x to 8 bits per 32 elements can do: half a step of the block's largest value / 127."""
    rng = np.random.default_rng(B)
    x = rng.normal(size=(B, 576)).astype(np.float32)
    step = np.repeat(np.abs(x).reshape(B, -1, 32).max(-1), 32, -1) / 127
    for node, w, product in (
        (*random_q8(rng, (33, 576), 32), jaxlm_cpu.matvec_q8),
        (*random_q4(rng, (33, 576), 32, mins), jaxlm_cpu.matvec_q4),
    ):
        y = f64(product(jnp.asarray(x), node, int8=True))
        spread = np.abs(w) if product is jaxlm_cpu.matvec_q8 else np.repeat(f64(node.scales), 32, -1) * 15
        assert (np.abs(y - x @ w.T) <= 0.51 * step @ spread.T + 1e-3).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("int8", [False, True])
def test_not_a_number_stays_visible(bad, int8):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 64)), jnp.float32).at[0, 40].set(bad)
    for node, product in (
        (random_q8(rng, (3, 64), 32)[0], jaxlm_cpu.matvec_q8),
        (random_q4(rng, (3, 64), 32, True)[0], jaxlm_cpu.matvec_q4),
    ):
        assert not np.isfinite(product(x, node, int8=int8)).any()


def test_tiny_and_zero_activations():
    rng = np.random.default_rng(1)
    x = np.zeros((1, 96), np.float32)
    x[0, 32:64] = rng.normal(size=32) * 1e-25
    node, w = random_q4(rng, (5, 96), 32, True)
    assert_product(jaxlm_cpu.matvec_q4(jnp.asarray(x), node), x, w)


def test_stack_under_scan_and_while_loop():
    """The stack is invariant, the layer an index of the loop; equal to one product after another."""
    rng = np.random.default_rng(2)
    w = jnp.asarray(rng.normal(size=(5, 64, 64)) / 8, jnp.bfloat16)
    node, wide = random_q4(rng, (5, 64, 64), 32, True)
    x = jnp.asarray(rng.normal(size=(2, 64)), jnp.float32)

    @jax.jit
    def scanned(x, w, node):
        step = lambda x, i: (jaxlm_cpu.matvec(x, w, i) + 0.1 * jaxlm_cpu.matvec_q4(x, node, i), None)  # noqa: E731
        return jax.lax.scan(step, x, jnp.arange(5))[0]

    @jax.jit
    def looped(x, w):
        step = lambda c: (c[0] + 1, jaxlm_cpu.matvec(c[1], w, c[0]))  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0] < 5, step, (0, x))[1]

    expected, plain = f64(x), f64(x)
    for i in range(5):
        expected = expected @ f64(w[i]).T + 0.1 * expected @ wide[i].T
        plain = plain @ f64(w[i]).T
    np.testing.assert_allclose(scanned(x, w, node), expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(looped(x, w), plain, atol=1e-5 * np.abs(plain).max())
    copies = scanned.lower(x, w, node).compile().memory_analysis().temp_size_in_bytes
    assert copies < w.nbytes / 5


def test_several_products_in_one_call():
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(3, 128)), jnp.float32)
    ws = [jnp.asarray(rng.normal(size=(n, 128)), jnp.float32) for n in (64, 1, 700)]
    for y, w in zip(jaxlm_cpu.matvec(x, ws), ws, strict=True):
        assert_product(y, x, w)
    nodes = [random_q4(rng, (n, 128), 32, True) for n in (64, 1, 700)]
    for y, (_, w) in zip(jaxlm_cpu.matvec_q4(x, [node for node, _ in nodes]), nodes, strict=True):
        assert_product(y, x, w)


def test_vmap_is_one_call_per_item():
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.normal(size=(3, 2, 40)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(7, 40)), jnp.float32)
    y = jax.vmap(jaxlm_cpu.matvec, (0, None))(x, w)
    for i in range(3):
        assert_product(y[i], x[i], w)


def attention(q, k_new, v_new, k, v, lengths, scale, softcap, window, chunk, sinks):
    """Query by query, with the ring's positions written out."""
    q, k_new, v_new, k, v = map(f64, (q, k_new, v_new, k, v))
    B, T, H, h = q.shape
    S, K = k.shape[1:3]
    out = np.zeros((B, T, H, h))
    for b, t, j in np.ndindex(B, T, H):
        n, head = int(lengths[b]), j // (H // K)
        position = n + t
        slots = [(s, s + S * ((n - 1 - s) // S)) for s in range(S)]
        places = [(p, k[b, s, head], v[b, s, head]) for s, p in slots]
        places += [(n + i, k_new[b, i, head], v_new[b, i, head]) for i in range(T)]
        seen = [
            (key, value) for p, key, value in places
            if 0 <= p <= position and (not window or position - p < window)
            and (not chunk or position // chunk == p // chunk)
        ]  # fmt: skip
        scores = np.array([key for key, _ in seen]) @ q[b, t, j] * scale
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        logits = scores if sinks is None else np.append(scores, sinks[j])
        weights = np.exp(scores - logits.max()) / np.exp(logits - logits.max()).sum()
        out[b, t, j] = weights @ np.array([value for _, value in seen])
    return out


@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(
    seed=seeds, B=st.integers(1, 3), K=st.integers(1, 3), G=st.integers(1, 4), h=st.sampled_from([1, 8, 20, 64, 128]),
    T=st.sampled_from([1, 1, 2, 5, 70]), S=st.sampled_from([1, 3, 64, 65, 300]),
    softcap=st.sampled_from([0.0, 3.0, 50.0]), data=st.data(),
)  # fmt: skip
def test_attention(seed, B, K, G, h, T, S, softcap, data):
    rng = np.random.default_rng(seed)
    window = data.draw(st.sampled_from([0, 1, 2, S // 2 + 1, S, S + 1, 3 * S]))
    chunk = data.draw(st.sampled_from([0, 0, 1, S // 2 + 1, 3 * S]))
    dtype, cache_dtype = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(FLOATS[:2]))
    lengths = np.array(data.draw(st.lists(st.integers(0, 3 * S), min_size=B, max_size=B)), np.int32)
    sinks = rng.normal(size=K * G).astype(np.float32) if data.draw(st.booleans()) else None
    draw = lambda dtype, *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    q, k_new, v_new = draw(dtype, B, T, K * G, h), draw(dtype, B, T, K, h), draw(dtype, B, T, K, h)
    # What lies in slots nobody may read is not a number: it would show.
    k, v = np.full((2, 2, B, S, K, h), np.nan)
    for b in range(B):
        used = min(S, lengths[b])
        k[1, b, :used], v[1, b, :used] = rng.normal(size=(2, used, K, h))
    k, v = jnp.asarray(k, cache_dtype), jnp.asarray(v, cache_dtype)
    scale = data.draw(st.sampled_from([None, 0.3]))
    options = {"scale": scale, "softcap": softcap, "window": window, "chunk": chunk}
    options["sinks"] = None if sinks is None else jnp.asarray(sinks)
    y = jaxlm_cpu.attention(q, k_new, v_new, k, v, jnp.asarray(lengths), jnp.int32(1), **options)
    expected = attention(q, k_new, v_new, k[1], v[1], lengths, scale or h**-0.5, softcap, window, chunk, sinks)
    rounded = T > 1 and dtype == jnp.bfloat16 and jaxlm_cpu.matrix_unit()  # Keys and weights too are bfloat16 there.
    np.testing.assert_allclose(f64(y), expected, atol=3e-2 if rounded else 1e-5)
    single = jaxlm_cpu.attention(q, k_new, v_new, k[1], v[1], jnp.asarray(lengths), **options)
    np.testing.assert_array_equal(np.asarray(single), np.asarray(y))


@pytest.mark.parametrize("cached", [0, 700])
def test_attention_of_a_long_prompt(cached):
    """Several blocks of queries and of keys."""
    rng = np.random.default_rng(cached)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    q, k_new, v_new, k, v = draw(1, 300, 3, 16), draw(1, 300, 1, 16), draw(1, 300, 1, 16), *draw(2, 1, 900, 1, 16)
    lengths = jnp.array([cached], jnp.int32)
    y = jaxlm_cpu.attention(q, k_new, v_new, k, v, lengths)
    np.testing.assert_allclose(f64(y), attention(q, k_new, v_new, k, v, lengths, 0.25, 0, 0, 0, None), atol=1e-5)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=seeds, R=st.integers(1, 3), B=st.integers(1, 3), S=st.integers(1, 9), T=st.integers(1, 12),
    types=st.sampled_from([(d, d) for d in FLOATS] + [(jnp.bfloat16, jnp.float32)]), data=st.data(),
)  # fmt: skip
def test_write(seed, R, B, S, T, types, data):
    """Token by token into a ring; the other slots and the argument stay as they were."""
    rng = np.random.default_rng(seed)
    old, new = (jnp.asarray(rng.normal(size=(R, B, n, 2, 3)), d) for n, d in zip((S, T), types, strict=True))
    lengths, counts = (data.draw(st.lists(st.integers(0, n), min_size=B, max_size=B)) for n in (30, T))
    expected = np.array(old)
    for b in range(B):
        for t in range(counts[b]):
            expected[:, b, (lengths[b] + t) % S] = np.asarray(new[:, b, t].astype(types[0]))
    before = np.array(old)
    written = jaxlm_cpu.write(old, new, jnp.array(lengths, jnp.int32), jnp.array(counts, jnp.int32))
    np.testing.assert_array_equal(np.asarray(written), expected)
    np.testing.assert_array_equal(np.asarray(old), before)


def test_write_is_in_place_and_rounds_to_even():
    old, n = jnp.zeros((1, 1, 64, 8, 64), jnp.bfloat16), jnp.zeros((1,), jnp.int32)
    write = jax.jit(jaxlm_cpu.write, donate_argnums=0)
    ties = jnp.array([1 + 2**-8, 1 + 3 * 2**-8, jnp.nan, jnp.inf, -jnp.inf, -0.0, 3.4e38, 1e-40], jnp.float32)
    new = jnp.broadcast_to(ties, (1, 1, 1, 64, 8)).reshape(1, 1, 1, 8, 64)
    compiled = write.lower(old, new, n, n + 1).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < old.nbytes / 8
    place = old.unsafe_buffer_pointer()
    written = write(old, new, n, n + 1)
    assert written.unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(np.asarray(written[0, 0, 0, 0, :8]), np.asarray(ties.astype(jnp.bfloat16)))


def test_write_refuses_counts_out_of_range():
    cache, n = jnp.ones((1, 1, 4, 1, 2)), jnp.ones((1,), jnp.int32)
    for lengths, counts in ((n, 3 * n), (n, -n), (-n, n)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="count outside 0"):
            jaxlm_cpu.write(cache, cache[:, :, :2], lengths, counts).block_until_ready()


def test_wrong_operands_are_refused_by_name():
    x, w = jnp.ones((1, 64)), jnp.ones((3, 64))
    q4 = jaxlm_cpu.Q4(jnp.ones((3, 32), jnp.uint8), jnp.ones((3, 2)), jnp.ones((3, 2)))
    new, cache, n = jnp.ones((1, 1, 2, 8)), jnp.ones((1, 5, 2, 8)), jnp.zeros((1,), jnp.int32)
    q = jnp.ones((1, 1, 4, 8))
    attend = jaxlm_cpu.attention
    cases = [
        ("width", lambda: jaxlm_cpu.matvec(x, jnp.ones((3, 63)))),
        ("dtype", lambda: jaxlm_cpu.matvec(x, jnp.ones((3, 64), jnp.int32))),
        ("x must be", lambda: jaxlm_cpu.matvec(x[0], w)),
        ("layer", lambda: jaxlm_cpu.matvec(x, w[None])),
        ("layer", lambda: jaxlm_cpu.matvec(x, w, 0)),
        ("one integer", lambda: jaxlm_cpu.matvec(x, w[None], 0.5)),
        ("empty", lambda: jaxlm_cpu.matvec(x, [])),
        ("one dtype", lambda: jaxlm_cpu.matvec(x, [w, w.astype(jnp.bfloat16)])),
        ("group", lambda: jaxlm_cpu.matvec_q4(x, q4._replace(scales=jnp.ones((3, 4)), mins=None))),
        ("mins", lambda: jaxlm_cpu.matvec_q4(x, q4._replace(mins=jnp.ones((3, 1))))),
        ("int8", lambda: jaxlm_cpu.matvec_q8(x, jaxlm_cpu.Q8(w, jnp.ones((3, 2))))),
        ("scales", lambda: jaxlm_cpu.matvec_q4(x, q4._replace(scales=jnp.ones((2, 2)), mins=None))),
        ("multiple", lambda: attend(jnp.ones((1, 1, 3, 8)), new, new, cache, cache, n)),
        ("k_new", lambda: attend(q, new[:, :, :1], new, cache, cache, n)),
        ("lengths", lambda: attend(q, new, new, cache, cache, n[None])),
        ("v_cache", lambda: attend(q, new, new, cache, cache[:, :4], n)),
        ("window", lambda: attend(q, new, new, cache, cache, n, window=-1)),
        ("chunk", lambda: attend(q, new, new, cache, cache, n, chunk=-1)),
        ("sinks", lambda: attend(q, new, new, cache, cache, n, sinks=jnp.ones((3,)))),
        ("differ in their third", lambda: jaxlm_cpu.write(cache[None], new[None, :, :, :1], n, n)),
        ("new has dtype", lambda: jaxlm_cpu.write(cache[None], new[None].astype(jnp.int32), n, n)),
        ("counts must be", lambda: jaxlm_cpu.write(cache[None], new[None], n, n[:0])),
    ]
    for text, call in cases:
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.parametrize("layer", [-1, 2])
def test_layer_out_of_range_fails_the_computation(layer):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"layer {layer} of a stack of 2"):
        jaxlm_cpu.matvec(jnp.ones((1, 8)), jnp.ones((2, 3, 8)), layer).block_until_ready()


def test_negative_length_fails_the_computation():
    new, cache = jnp.ones((1, 1, 2, 8)), jnp.ones((1, 5, 2, 8))
    with pytest.raises(jax.errors.JaxRuntimeError, match="negative"):
        jaxlm_cpu.attention(new, new, new, cache, cache, jnp.array([-1])).block_until_ready()


def test_handlers_check_shapes_themselves():
    """A call past the wrapper, with weights narrower than x, is an error and not a read out of bounds."""
    call = jax.ffi.ffi_call("jaxlm_cpu_matvec", [jax.ShapeDtypeStruct((1, 4), jnp.float32)])
    with pytest.raises(jax.errors.JaxRuntimeError, match="differ in K"):
        jax.block_until_ready(call(jnp.ones((1, 64)), jnp.int32(0), jnp.ones((4, 8))))


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_other_instruction_sets_agree(isa):
    """The properties of this file, in a process held to another instruction set (it may fall back to portable)."""
    if os.environ.get("JAXLM_CPU_ISA"):
        pytest.skip("already inside such a process")
    tests = [f"{__file__}::{name}" for name in ("test_matvec_any_shape_and_dtype", "test_quantised_products_are_exact",
                                                "test_attention")]  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "JAXLM_CPU_ISA": isa, "JAXLM_CPU_THREADS": "2"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-2000:]


def test_pool_survives_a_fork():
    code = (
        "import os, jaxlm_cpu as k; assert k.read_bandwidth(64 << 20, 0.01) > 0\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(0 if k.read_bandwidth(64 << 20, 0.01) > 0 else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_probe():
    assert jaxlm_cpu.isa() in ("portable", "avx2", "avx512", "avx512_vnni") and jaxlm_cpu.threads() >= 1
    assert 1e8 < jaxlm_cpu.read_bandwidth(64 << 20, 0.01) < 1e13
    with pytest.raises(ValueError, match="size"):
        jaxlm_cpu.read_bandwidth(0)


def test_another_version_of_the_package_is_left_unused(monkeypatch):
    monkeypatch.setattr(jaxlm_cpu, "INTERFACE", 1)
    with pytest.warns(UserWarning, match="pip install ./kernels"):
        assert cpu.kernels.__wrapped__() is None
    monkeypatch.undo()
    assert cpu.kernels.__wrapped__() is jaxlm_cpu
