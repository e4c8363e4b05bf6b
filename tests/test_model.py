"""Laws of the whole model: the numbers are right, and every route to them gives the same ones."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

import jaxlm
from jaxlm import cpu
from jaxlm.errors import JaxlmTypeError, RequestError

WIDTH = 5  # Ids per call of `prefill` in these tests; longer than the windows of the fixed configs.
FIXED = [tiny.FULL, tiny.MIXED, tiny.BIASES, tiny.WINDOWED]
fixed = st.sampled_from(FIXED)
caches = st.sampled_from([*((config, 30) for config in FIXED), (tiny.MIXED, 41), (tiny.OTHERS, 41)])
plans = st.lists(st.tuples(*[st.integers(1, WIDTH)] * 3), min_size=1, max_size=6)


def run_plan(config, plan, cache, params, tokens, padding):
    """Feed each row by the plan's counts, lone ids through `decode_step`. Yields (logits, cache, ends)."""
    ends = np.zeros(3, np.int32)
    for step, counts in enumerate(plan):
        counts = np.array(counts, np.int32)
        if (counts == 1).all():
            logits, cache = tiny.decode_step(params, tokens[np.arange(3), ends], cache, config)
        else:
            chunk = tiny.random_tokens((3, WIDTH), padding + step)
            for row in range(3):
                chunk[row, : counts[row]] = tokens[row, ends[row] : ends[row] + counts[row]]
            logits, cache = tiny.prefill(params, chunk, cache, config, counts)
        ends = ends + counts
        yield logits, cache, ends


@tiny.examples(10)
@given(tiny.configs(), st.integers(0, 2**31))
def test_logits_equal_the_float64_model_at_every_position(config, seed):
    params, tokens = tiny.random_params(config, seed), tiny.random_tokens((2, 8), seed, config.vocab_size)
    found = tiny.forward(params, tokens, config)
    assert found.dtype == "float32"
    assert tiny.relative_error(found, oracle.forward(params, tokens, config)) < 1e-4


@pytest.mark.parametrize(("dtype", "noise"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_narrow_models_are_within_rounding_of_the_float64_model(dtype, noise):
    for base in (tiny.FULL, tiny.BIASES):
        config = jaxlm.ModelConfig(**{**vars_of(base), "dtype": dtype})
        params, tokens = tiny.random_params(config), tiny.random_tokens((2, 12))
        found = tiny.forward(params, tokens, config)
        assert found.dtype == "float32"
        assert tiny.relative_error(found, oracle.forward(params, tokens, config)) < 16 * noise


def vars_of(config):
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_logits_are_not_rounded_to_the_models_dtype():
    config = tiny.config(dtype="bfloat16")
    params = tiny.random_params(config)
    logits = np.asarray(tiny.forward(params, tiny.random_tokens((2, 12)), config))
    assert (logits != np.asarray(jnp.asarray(logits, jnp.bfloat16), np.float32)).mean() > 0.9


@tiny.examples(5)
@given(tiny.configs(), st.integers(0, 2**31))
def test_prefill_and_decode_equal_the_float64_model(config, seed):
    """Ragged chunks of 5, 3, 4, then 2, 5, 1, then one id each, on any config; the windows wrap."""
    params, tokens = tiny.random_params(config, seed), tiny.random_tokens((3, 9), seed, config.vocab_size)
    expected = oracle.forward(params, tokens, config)
    cache = jaxlm.init_cache(config, 3, 9)
    for counts in ((5, 3, 4), (2, 5, 1), (1, 1, 1)):
        lengths = np.array(counts, np.int32)
        ends = np.asarray(cache.lengths) + lengths
        chunk = np.zeros((3, 5), np.int32)
        for row in range(3):
            chunk[row, : lengths[row]] = tokens[row, ends[row] - lengths[row] : ends[row]]
        if lengths.max() == 1:
            logits, cache = tiny.decode_step(params, chunk[:, 0], cache, config)
        else:
            logits, cache = tiny.prefill(params, chunk, cache, config, lengths)
        assert tiny.relative_error(logits, expected[np.arange(3), ends - 1]) < 1e-4


@tiny.examples(50)
@given(caches, plans, st.sampled_from([0.0, 1e4, -1e4, np.nan]), st.integers(0, 1000))
def test_any_split_of_any_rows_equals_the_whole(model, plan, junk, padding):
    """Whatever the chunks, the padding, the cache's length and what its free slots hold."""
    config, max_len = model
    params, tokens, expected = tiny.known(config)
    cache = tiny.filled(jaxlm.init_cache(config, 3, max_len), junk)
    for logits, after, ends in run_plan(config, plan, cache, params, tokens, padding):
        assert tiny.relative_error(logits, expected[np.arange(3), ends - 1]) < 1e-4
        assert np.array_equal(after.lengths, ends)


@tiny.examples(20)
@given(fixed, plans, st.integers(0, 1000))
def test_caches_can_be_forked(config, plan, padding):
    """Each step leaves its arguments as they were, and the older caches still give the same continuation."""
    params, tokens, _ = tiny.known(config)
    cache = jaxlm.init_cache(config, 3, 30)
    copied = jax.tree.map(np.array, params)
    seen = [(cache, jax.tree.map(np.array, cache), None)]
    for logits, after, _ in run_plan(config, plan, cache, params, tokens, padding):
        seen.append((after, jax.tree.map(np.array, after), logits))
    other = run_plan(config, [(2, 3, 4)], cache, params, tokens[:, ::-1], padding)
    list(other)  # Something else from the same start.
    for (old, copy, _), counts, (_, _, logits) in zip(seen, plan, seen[1:], strict=False):
        assert tiny.equal_trees(old, copy)
        starts = np.asarray(old.lengths)
        rolled = np.stack([np.roll(row, -n) for row, n in zip(tokens, starts, strict=True)])
        again, _, _ = next(run_plan(config, [counts], old, params, rolled, padding + 7))
        assert tiny.relative_error(again, logits) < 1e-5
    assert tiny.equal_trees(params, copied)


@tiny.examples(10)
@given(fixed, plans)
def test_a_batch_equals_its_rows_alone(config, plan):
    params, tokens, _ = tiny.known(config)
    together = list(run_plan(config, plan, jaxlm.init_cache(config, 3, 30), params, tokens, 0))
    for row in range(3):
        cache = jaxlm.init_cache(config, 1, 30)
        start = 0
        for counts, (logits, _, _) in zip(plan, together, strict=True):
            chunk = np.zeros((1, WIDTH), np.int32)
            chunk[0, : counts[row]] = tokens[row, start : start + counts[row]]
            alone, cache = tiny.prefill(params, chunk, cache, config, np.array([counts[row]], np.int32))
            start += counts[row]
            assert tiny.relative_error(alone[0], logits[row]) < 1e-4


@pytest.mark.parametrize("config", [tiny.ALTERNATE, tiny.BIASES], ids=["alternate", "biases"])
def test_scan_equals_unrolled_with_gradients(config):
    params, tokens, expected = tiny.known(config)
    weights = jnp.asarray(np.random.default_rng(0).standard_normal(expected.shape), jnp.float32)

    def loss(params):
        return jnp.sum(jaxlm.forward(params, tokens, config) * weights)

    single = jaxlm.unstack(params)
    assert tiny.relative_error(tiny.forward(single, tokens, config), expected) < 1e-5
    stacked, unrolled = jax.jit(jax.grad(loss))(params), jax.jit(jax.grad(loss))(single)
    pairs = list(zip(jax.tree.leaves(jaxlm.unstack(stacked)), jax.tree.leaves(unrolled), strict=True))
    largest = max(np.abs(a).max() for a, _ in pairs)
    for a, b in pairs:  # Without rope a key bias shifts all scores alike, so its gradient is nothing but rounding.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * largest + 2e-5 * np.abs(a).max())


def test_scan_equals_unrolled_with_a_cache():
    params, tokens, _ = tiny.known(tiny.ALTERNATE)
    plan = [(5, 2, 3), (1, 1, 1)]
    runs = [
        list(run_plan(tiny.ALTERNATE, plan, jaxlm.init_cache(tiny.ALTERNATE, 3, 30), p, tokens, 0))
        for p in (params, jaxlm.unstack(params))
    ]
    for (a, cache_a, _), (b, cache_b, _) in zip(*runs, strict=True):
        assert tiny.relative_error(a, b) < 1e-5
        assert jax.tree.structure(cache_a) == jax.tree.structure(cache_b)
        for x, y in zip(jax.tree.leaves(cache_a), jax.tree.leaves(cache_b), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_jit_equals_no_jit():
    params, tokens, expected = tiny.known(tiny.ALTERNATE)
    assert tiny.relative_error(jaxlm.forward(params, tokens, tiny.ALTERNATE), expected) < 1e-5
    cache = jaxlm.init_cache(tiny.ALTERNATE, 3, 30)
    lengths = np.array([5, 1, 3], np.int32)
    eager, eager_cache = jaxlm.prefill(params, tokens[:, :5], cache, tiny.ALTERNATE, lengths)
    jitted, jitted_cache = tiny.prefill(params, tokens[:, :5], cache, tiny.ALTERNATE, lengths)
    assert tiny.relative_error(eager, jitted) < 1e-5
    assert tiny.relative_error(eager, expected[np.arange(3), lengths - 1]) < 1e-4
    eager, _ = jaxlm.decode_step(params, tokens[:, 5], eager_cache, tiny.ALTERNATE)
    jitted, _ = tiny.decode_step(params, tokens[:, 5], jitted_cache, tiny.ALTERNATE)
    assert tiny.relative_error(eager, jitted) < 1e-5


def test_without_jit_the_second_step_compiles_nothing():
    params, tokens, _ = tiny.known(tiny.FULL)
    _, cache = jaxlm.decode_step(params, tokens[:, 0], jaxlm.init_cache(tiny.FULL, 3, 30), tiny.FULL)
    with tiny.count_compiles() as compiled:
        jaxlm.decode_step(params, tokens[:, 1], cache, tiny.FULL)
    assert not compiled


def test_prefill_counts_whole_rows_by_default():
    params, tokens, expected = tiny.known(tiny.FULL)
    logits, cache = jaxlm.prefill(params, tokens[:, :4].tolist(), jaxlm.init_cache(tiny.FULL, 3, 8), tiny.FULL)
    assert tiny.relative_error(logits, expected[:, 3]) < 1e-4
    assert cache.lengths.tolist() == [4, 4, 4]


def test_the_pieces_under_vmap():
    """A leading axis of models: embed, block and lm_head under one vmap equal the models one by one."""
    stack = [tiny.random_params(tiny.BIASES, seed) for seed in (1, 2)]
    params = jax.tree.map(lambda *a: jnp.stack(a), *stack)
    tokens = tiny.random_tokens((2, 3, 7))
    found = jax.vmap(functools.partial(jaxlm.forward, config=tiny.BIASES))(params, tokens)
    for i in range(2):
        assert tiny.relative_error(found[i], tiny.forward(stack[i], tokens[i], tiny.BIASES)) < 1e-5


def reach(config, length=12):
    """Which inputs each position's logits depend on, by gradient: bool [length, length].

    The ids are 0, 1, 2, ..., so that row i of the embedding table is the input at position i alone.
    """
    params = tiny.random_params(config, 3)

    def logits(table):
        return jaxlm.forward({**params, "embed": {"table": table}}, jnp.arange(length)[None, :], config)[0]

    jacobian = jax.jit(jax.jacrev(logits))(params["embed"]["table"])  # [length, V, V, D]
    return np.abs(np.asarray(jacobian)).max(axis=(1, 3))[:, :length] > 0


def test_few_rows_have_gradients():
    """Calls so small that other code may serve them."""
    params, tokens, _ = tiny.known(tiny.FULL)

    def loss(params):
        return jnp.mean(jaxlm.forward(params, tokens[:1, :4], tiny.FULL) ** 2)

    few = jax.jit(jax.grad(loss))(params)
    many = jax.jit(jax.grad(lambda p: jnp.mean(jaxlm.forward(p, tokens[[0] * 9, :4], tiny.FULL) ** 2)))(params)
    for a, b in zip(jax.tree.leaves(few), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("window", [0, 1, 3, 4])
@pytest.mark.parametrize("depth", [1, 2])
def test_each_position_depends_on_exactly_what_it_may_see(window, depth):
    """Nothing ahead; with windows of W, W - 1 tokens back for each layer."""
    back = np.arange(12)[:, None] - np.arange(12)[None, :]
    furthest = depth * (window - 1) if window else 12
    allowed = (back >= 0) & (back <= furthest)
    assert np.array_equal(reach(tiny.config(*[tiny.layer(window)] * depth)), allowed)


@pytest.mark.parametrize("config", [tiny.FULL, tiny.WINDOWED], ids=["full", "windowed"])
def test_decoding_reaches_as_far_back_as_the_whole_sequence_does(config):
    """Change one id of the past: the next logits change exactly when it is within reach."""
    params, tokens, _ = tiny.known(config)
    distance = 6 if config == tiny.WINDOWED else 99  # Two layers of windows of 4.

    def last(row):
        _, cache = tiny.prefill(params, row[None, :10], jaxlm.init_cache(config, 1, 16), config)
        return tiny.decode_step(params, row[10:11], cache, config)[0]

    base = last(tokens[0])
    for position in range(10):
        changed = tokens[0].copy()
        changed[position] = (changed[position] + 1) % tiny.VOCAB
        assert np.array_equal(last(changed), base) == (10 - position > distance)


def test_the_length_counts_a_token_only_after_its_own_step():
    params, tokens, _ = tiny.known(tiny.FULL)
    logits, cache = tiny.prefill(params, tokens[:, :4], jaxlm.init_cache(tiny.FULL, 3, 8), tiny.FULL)
    chosen = jaxlm.sample(logits, jax.random.key(0), temperature=0.0)
    assert cache.lengths.tolist() == [4, 4, 4]
    slot = [kv.k[:, :, 4] for segment in cache.layers for kv in segment]
    assert not any(np.any(np.asarray(k)) for k in slot)  # The chosen token's keys are not there yet.
    _, after = tiny.decode_step(params, chosen, cache, tiny.FULL)
    assert after.lengths.tolist() == [5, 5, 5]
    assert all(np.asarray(kv.k[:, :, 4]).any(axis=(-1, -2)).all() for segment in after.layers for kv in segment)


class TestGradients:
    @pytest.mark.parametrize("config", [tiny.MIXED, tiny.BIASES], ids=["mixed", "biases"])
    def test_finite_through_padded_rows(self, config):
        """Padding ids past each length, one row of a single real token."""
        params, tokens, _ = tiny.known(config)
        lengths = np.array([1, 5, 3], np.int32)
        cache = tiny.filled(jaxlm.init_cache(config, 3, 8), 1e4)

        def loss(params):
            return jnp.sum(jaxlm.prefill(params, jnp.asarray(tokens[:, :5]), cache, config, lengths)[0] ** 2)

        with jax.debug_nans(True):
            gradients = jax.jit(jax.grad(loss))(params)
        assert all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(gradients))

    @pytest.mark.parametrize("kind", ["rms", "layer"])
    @pytest.mark.parametrize("depth", [1, 4])
    def test_finite_with_zero_vectors_and_no_eps(self, kind, depth):
        """A table row of zeros, as for a padding id, gives a zero vector at every norm."""
        bare = jaxlm.NormSpec(kind, eps=0.0)
        config = tiny.config(*[tiny.layer(norm=bare)] * depth, final_norm=bare)
        params = tiny.random_params(config)
        params["embed"]["table"] = params["embed"]["table"].at[0].set(0.0)
        tokens = jnp.asarray([[0, 0, 5, 0, 3], [0, 0, 0, 0, 0]], jnp.int32)
        with jax.debug_nans(True):
            gradients = jax.jit(jax.grad(lambda p: jnp.sum(jaxlm.forward(p, tokens, config) ** 2)))(params)
        assert all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(gradients))

    def test_equal_finite_differences(self):
        """The tied table's gradient is the sum over both of its uses."""
        params, tokens = tiny.random_params(tiny.BIASES), tiny.random_tokens((2, 6))

        def loss(params):
            return jnp.mean(jaxlm.forward(params, tokens, tiny.BIASES) ** 2)

        direction = tiny.random_params(tiny.BIASES, 9)
        step = 1e-2
        ahead, behind = (jax.tree.map(lambda p, d, s=s: p + s * d, params, direction) for s in (step, -step))
        exact = oracle_loss(ahead, tokens) - oracle_loss(behind, tokens)
        slopes = jax.tree.map(jnp.vdot, jax.jit(jax.grad(loss))(params), direction)
        assert abs(sum(map(float, jax.tree.leaves(slopes))) / (exact / (2 * step)) - 1) < 0.02


def oracle_loss(params, tokens):
    return float(np.mean(oracle.forward(params, tokens, tiny.BIASES) ** 2))


class TestRequests:
    """Bad input is refused before compute; where values cannot be read, that row alone turns to NaN."""

    params = tiny.random_params(tiny.FULL)

    @pytest.mark.parametrize("bad", [-1, tiny.VOCAB, 2**31 - 1, -(2**31)])
    def test_ids_out_of_range(self, bad):
        tokens = np.array([[1, 2, 3], [4, bad, 5]], np.int32)
        cache = jaxlm.init_cache(tiny.FULL, 2, 8)
        with pytest.raises(RequestError, match=f"{bad}.*0 to {tiny.VOCAB - 1}"):
            jaxlm.forward(self.params, tokens, tiny.FULL)
        with pytest.raises(RequestError, match=str(bad)):
            jaxlm.prefill(self.params, tokens, cache, tiny.FULL)
        with pytest.raises(RequestError, match=str(bad)):
            jaxlm.decode_step(self.params, tokens[:, 1], cache, tiny.FULL)
        logits = np.asarray(tiny.forward(self.params, tokens, tiny.FULL))
        assert np.isfinite(logits[0]).all() and np.isnan(logits[1, 1:]).all()
        logits = np.asarray(tiny.prefill(self.params, tokens, cache, tiny.FULL)[0])
        assert np.isfinite(logits[0]).all() and np.isnan(logits[1]).all()

    def test_wide_ids_are_not_wrapped_into_range(self):
        with pytest.raises(RequestError, match=str(2**32 + 1)):
            jaxlm.forward(self.params, np.array([[2**32 + 1]], np.int64), tiny.FULL)

    @pytest.mark.parametrize("tokens", [[[1.0, 2.0]], [[True, False]], [["a"]], np.zeros((1, 2), np.float16)])
    def test_ids_that_are_no_integers(self, tokens):
        for call in (jaxlm.forward, functools.partial(jaxlm.prefill, cache=jaxlm.init_cache(tiny.FULL, 1, 4))):
            with pytest.raises(JaxlmTypeError, match="dtype"):
                call(self.params, tokens, config=tiny.FULL)

    @pytest.mark.parametrize("shape", [(0, 3), (2, 0), (3,), (1, 2, 3), ()])
    def test_ids_of_the_wrong_shape(self, shape):
        with pytest.raises(RequestError, match="shape"):
            jaxlm.forward(self.params, np.zeros(shape, np.int32), tiny.FULL)
        with pytest.raises(RequestError, match="shape"):
            jaxlm.decode_step(self.params, np.zeros((2, 1), np.int32), jaxlm.init_cache(tiny.FULL, 2, 4), tiny.FULL)

    @pytest.mark.parametrize("lengths", [[0, 1], [1, 4], [-1, 1], [1], [[1, 1]]])
    def test_lengths_that_do_not_fit_the_rows(self, lengths):
        cache = jaxlm.init_cache(tiny.FULL, 2, 8)
        with pytest.raises(RequestError, match="length"):
            jaxlm.prefill(self.params, np.ones((2, 3), np.int32), cache, tiny.FULL, np.array(lengths))

    def test_rows_and_cache_of_different_sizes(self):
        with pytest.raises(RequestError, match="3 rows"):
            jaxlm.prefill(self.params, np.ones((2, 3), np.int32), jaxlm.init_cache(tiny.FULL, 3, 8), tiny.FULL)

    def test_past_the_end_is_refused_before_compute(self):
        cache = jaxlm.init_cache(tiny.FULL, 2, 5)
        _, cache = jaxlm.prefill(self.params, np.ones((2, 4), np.int32), cache, tiny.FULL, np.array([2, 4]))
        with pytest.raises(RequestError, match=r"row 1 .* 6 .* 5"):
            jaxlm.prefill(self.params, np.ones((2, 2), np.int32), cache, tiny.FULL)
        _, cache = jaxlm.decode_step(self.params, np.ones(2, np.int32), cache, tiny.FULL)
        with pytest.raises(RequestError, match=r"row 1 .* 6 .* 5"):
            jaxlm.decode_step(self.params, np.ones(2, np.int32), cache, tiny.FULL)

    def test_past_the_end_under_jit_is_nan_and_leaves_other_rows(self):
        params, tokens, expected = tiny.known(tiny.FULL)
        cache = jaxlm.init_cache(tiny.FULL, 3, 5)
        _, cache = tiny.prefill(params, tokens[:, :5], cache, tiny.FULL, np.array([3, 5, 4], np.int32))
        for step in range(2):
            ids = tokens[np.arange(3), np.asarray([3, 5, 4]) + step]
            logits, cache = tiny.decode_step(params, ids, cache, tiny.FULL)
            assert np.isnan(np.asarray(logits[1])).all()
            assert tiny.relative_error(logits[0], expected[0, 3 + step]) < 1e-4
        assert np.isnan(np.asarray(logits[2])).all()

    def test_past_the_end_under_jit_overwrites_nothing(self):
        params, tokens, _ = tiny.known(tiny.FULL)
        _, full = tiny.prefill(params, tokens[:, :5], jaxlm.init_cache(tiny.FULL, 3, 5), tiny.FULL)
        _, after = tiny.decode_step(params, tokens[:, 5], full, tiny.FULL)
        assert tiny.equal_trees(after.layers, full.layers)

    @pytest.mark.parametrize("lengths", [[0, 1], [1, 4], [-1, 1]])
    def test_lengths_out_of_range_under_jit_are_nan(self, lengths):
        cache = jaxlm.init_cache(tiny.FULL, 2, 8)
        tokens = np.ones((2, 3), np.int32)
        logits, _ = tiny.prefill(self.params, tokens, cache, tiny.FULL, np.array(lengths, np.int32))
        bad = [not 1 <= n <= 3 for n in lengths]
        assert np.isnan(np.asarray(logits)).all(axis=1).tolist() == bad

    def test_lengths_must_be_integers(self):
        cache = jaxlm.init_cache(tiny.FULL, 2, 8)
        with pytest.raises(JaxlmTypeError, match="length"):
            jaxlm.prefill(self.params, np.ones((2, 3), np.int32), cache, tiny.FULL, np.array([1.5, 2.5]))

    def test_windowed_models_go_on_forever(self):
        """Rings have no end: 24 tokens through caches of 4 slots."""
        params, tokens, expected = tiny.known(tiny.WINDOWED)
        cache = jaxlm.init_cache(tiny.WINDOWED, 3, 4)
        plan = [(5, 5, 5)] * 4 + [(1, 1, 1)] * 4
        for logits, _, ends in run_plan(tiny.WINDOWED, plan, cache, params, tokens, 0):
            assert tiny.relative_error(logits, expected[np.arange(3), ends - 1]) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_300_tokens_through_the_cache_in_each_dtype(dtype):
    """Cached and whole differ by no more than the dtype's own noise, and the cache keeps its dtype."""
    config = tiny.config(tiny.layer(), tiny.layer(), dtype=dtype)
    params, tokens = tiny.random_params(config), tiny.random_tokens((1, 300))
    whole = np.asarray(tiny.forward(params, tokens, config))[:, -3:]
    noise = np.abs(whole - oracle.forward(params, tokens, config)[:, -3:]).max()
    cache = jaxlm.init_cache(config, 1, 300)
    _, cache = tiny.prefill(params, tokens[:, :149], cache, config)
    logits, cache = tiny.prefill(params, tokens[:, 149:298], cache, config)
    rows = [logits]
    for position in (298, 299):
        assert all(a.dtype == dtype for a in jax.tree.leaves(cache.layers))
        logits, cache = tiny.decode_step(params, tokens[:, position], cache, config)
        rows.append(logits)
    assert all(a.dtype == dtype for a in jax.tree.leaves(cache.layers))
    assert np.abs(np.stack(rows, axis=1) - whole).max() < 3 * noise


def test_a_cache_may_be_wider_than_the_model():
    """A float32 cache of a bfloat16 model keeps its dtype and gives nearly the same logits."""
    config = tiny.config(dtype="bfloat16")
    params, tokens = tiny.random_params(config), tiny.random_tokens((1, 8))
    cache = jaxlm.init_cache(config, 1, 8, dtype="float32")
    _, cache = tiny.prefill(params, tokens[:, :7], cache, config)
    logits, cache = tiny.decode_step(params, tokens[:, 7], cache, config)
    assert all(a.dtype == "float32" for a in jax.tree.leaves(cache.layers))
    assert tiny.relative_error(logits, tiny.forward(params, tokens, config)[:, -1]) < 0.05


WIDENED = pytest.mark.xfail(cpu.kernels() is None, strict=True, reason="XLA's scatter widens the whole cache")


class TestCompiledDecodeStep:
    """What the compiler makes of a step with a donated cache; no timing."""

    layers = (tiny.layer(head_dim=16, inner=128),) * 8
    config = tiny.config(*layers, vocab_size=64, hidden_size=64, tie_embeddings=True)

    def compiled(self, dtype):
        config = tiny.config(*self.layers, vocab_size=64, hidden_size=64, tie_embeddings=True, dtype=dtype)
        params, cache = tiny.random_params(config), jaxlm.init_cache(config, 2, 256)
        step = jax.jit(jaxlm.decode_step, static_argnums=3, donate_argnums=2)
        memory = step.lower(params, jnp.zeros(2, jnp.int32), cache, config).compile().memory_analysis()
        return memory, params, cache

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_cache_is_updated_in_place(self, dtype):
        memory, _, cache = self.compiled(dtype)
        assert memory.alias_size_in_bytes == sum(a.nbytes for a in jax.tree.leaves(cache))

    @pytest.mark.parametrize(
        "dtype",
        [
            "float32",
            pytest.param("bfloat16", marks=WIDENED),
        ],
    )
    def test_it_needs_no_more_than_one_layer_besides(self, dtype):
        """One layer's weights and cache, and 64 KiB for activations."""
        memory, params, cache = self.compiled(dtype)
        layer = sum(a.nbytes for a in jax.tree.leaves((params["segments"], cache.layers))) / 8
        assert memory.temp_size_in_bytes < layer + 2**16

    def test_weights_are_arguments(self):
        """Nothing of a parameter's size is a constant of the program."""
        params, cache = tiny.random_params(self.config), jaxlm.init_cache(self.config, 2, 256)
        ids = jnp.zeros(2, jnp.int32)
        closed = jax.make_jaxpr(jaxlm.decode_step, static_argnums=3)(params, ids, cache, self.config)
        assert sum(np.size(c) for c in closed.consts) <= 16
        swapped = tiny.random_params(self.config, 5)
        size = tiny.decode_step._cache_size()
        first, _ = tiny.decode_step(params, ids, cache, self.config)
        second, _ = tiny.decode_step(swapped, ids, cache, self.config)
        assert tiny.decode_step._cache_size() == size + 1
        assert tiny.relative_error(first, second) > 0.1


@pytest.mark.parametrize("batch", [1, 7])
def test_latent_attention_in_bfloat16(batch):
    """Its products by head run in every size, and nearly as in float32."""
    latent = jaxlm.config.LatentAttentionSpec(4, 32, 32, 16, 32, jaxlm.RopeSpec(), jaxlm.NormSpec())
    config = tiny.config(jaxlm.LayerSpec(latent, jaxlm.FFNSpec(8)), dtype="bfloat16")
    params, tokens = tiny.random_params(config), tiny.random_tokens((batch, 6))
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    expected = np.asarray(jaxlm.forward(wide, tokens, dataclasses.replace(config, dtype="float32")))
    assert tiny.relative_error(jaxlm.forward(params, tokens, config), expected) < 0.1
    logits, cache = jaxlm.prefill(params, tokens[:, :5], jaxlm.init_cache(config, batch, 8), config)
    assert tiny.relative_error(logits, expected[:, 4]) < 0.1
    logits, _ = jaxlm.decode_step(params, tokens[:, 5], cache, config)
    assert tiny.relative_error(logits, expected[:, 5]) < 0.1
