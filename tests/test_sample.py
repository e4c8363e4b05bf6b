"""Choosing an id, against a plain sort in numpy, and draws against their probabilities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import assume, given, reject
from hypothesis import strategies as st

import jaxlm
from jaxlm.errors import RequestError
from jaxlm.sample import REFUSED, check_settings, filter_logits, penalise_repeats, row_keys

jitted = jax.jit(jaxlm.sample)
KEY = jax.random.key(0)


def sample(logits, key, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Under jit, with settings as arrays, so that only another shape compiles again."""
    kinds = {"temperature": "f4", "top_k": "i4", "top_p": "f4", "min_p": "f4"}
    values = zip(kinds, (temperature, top_k, top_p, min_p), kinds.values(), strict=True)
    rows = {name: np.broadcast_to(np.asarray(value, kind), logits.shape[:1]) for name, value, kind in values}
    return jitted(jnp.asarray(logits), key, **rows)


def kept_set(logits, temperature, top_k, top_p, min_p):
    """Ids that survive, by sorting: temperature, top-k, top-p among those left, min-p against the largest."""
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    kept = np.isfinite(scaled)
    if 0 < top_k < len(scaled):
        kept &= scaled >= np.sort(scaled)[-top_k]
    unclear = False  # What a sum in float32 may decide either way.
    if top_p < 1:
        share = np.where(kept, weights, 0) / weights[kept].sum()
        sums = np.cumsum(np.sort(share)[::-1])
        unclear = np.abs(sums - top_p).min() < 1e-5
        last = np.sort(share)[::-1][int(np.argmax(sums >= top_p))]
        kept &= share >= last * (1 - 1e-9)
    unclear |= min_p > 0 and np.abs(weights - min_p).min() < 1e-5
    if unclear:
        reject()
    return kept & (weights >= min_p)


rows = st.lists(st.integers(-8, 8).map(lambda n: n / 2) | st.just(-np.inf), min_size=6, max_size=6)
choices = st.tuples(
    st.sampled_from([0.3, 1.0, 2.5]), st.integers(0, 8), st.sampled_from([1.0, 0.95, 0.6, 0.31, 1e-8]),
    st.sampled_from([0.0, 0.05, 0.3, 0.999]),
)  # fmt: skip


@tiny.examples(200)
@given(st.lists(st.tuples(rows, choices), min_size=3, max_size=3))
def test_the_kept_ids_are_those_of_a_sort(batch):
    """Each row by its own settings; the survivors keep their logits over temperature."""
    assume(all(np.isfinite(row).any() for row, _ in batch))
    logits = np.array([row for row, _ in batch], np.float32)
    columns = zip(*(choice for _, choice in batch), strict=True)
    arrays = [jnp.asarray(column, kind) for column, kind in zip(columns, "fiff", strict=True)]
    found = np.asarray(jax.jit(filter_logits)(jnp.asarray(logits), *arrays))
    for row, (values, choice) in enumerate(batch):
        expected = kept_set(values, *choice)
        assert np.array_equal(np.isfinite(found[row]), expected)
        shifted = logits[row, expected] - found[row, expected] * choice[0]
        np.testing.assert_allclose(np.ptp(shifted), 0, atol=1e-4)


@tiny.examples(100)
@given(rows, choices, st.integers(0, 2**32 - 1))
def test_a_draw_is_one_of_the_kept_ids(row, choice, seed):
    assume(np.isfinite(row).any())
    found = sample(np.tile(np.array(row, np.float32), (8, 1)), jax.random.key(seed), *choice)
    assert found.dtype == jnp.int32 and found.shape == (8,)
    assert kept_set(row, *choice)[np.asarray(found)].all()


def frequencies(logits, **options):
    """How often each id is drawn in 20000 rows."""
    padded = np.append(np.asarray(logits, np.float32), [-np.inf] * (5 - len(logits)))
    return np.bincount(np.asarray(sample(np.tile(padded, (20_000, 1)), KEY, **options)), minlength=len(logits))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 2.0, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_draws_follow_the_probabilities(options):
    """Chi-square with one key per row; 30 is exceeded once in 10^5 times by chance, and the key is fixed."""
    logits = np.array([1.0, -0.5, 2.0, 0.3, -2.0])
    choice = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    kept = kept_set(logits, **choice)
    weights = np.where(kept, np.exp(logits / choice["temperature"]), 0)
    expected = 20_000 * weights / weights.sum()
    found = frequencies(logits, **options)
    assert not found[~kept].any()
    assert ((found - expected)[kept] ** 2 / expected[kept]).sum() < 30


class TestOrder:
    """Temperature comes first, then top-k, top-p and min-p, each on what the one before left."""

    def kept(self, logits, **choice):
        return set(np.flatnonzero(frequencies(logits, **choice)).tolist())

    def test_temperature_before_top_p(self):
        assert self.kept([3.0, 2.0, 1.0], temperature=0.5, top_p=0.8) == {0}
        assert self.kept([3.0, 2.0, 1.0], temperature=1.0, top_p=0.8) == {0, 1}

    def test_top_k_before_top_p(self):
        """Of the best two the first has 0.62; of all five it has 0.43."""
        logits = [1.0, 0.5, 0.0, -0.5, -1.0]
        assert self.kept(logits, top_k=2, top_p=0.6) == {0}
        assert self.kept(logits, top_p=0.6) == {0, 1}

    def test_min_p_is_relative_to_the_largest_at_that_temperature(self):
        logits = [1.0, 0.0, -1.0]
        assert self.kept(logits, min_p=0.3) == {0, 1}
        assert self.kept(logits, min_p=0.3, temperature=4.0) == {0, 1, 2}
        assert self.kept(logits, min_p=1.0) == {0}
        assert self.kept([1.0, 1.0, 0.9], min_p=1.0) == {0, 1}

    def test_ties_are_kept(self):
        assert self.kept([1.0, 1.0, 1.0, 0.0], top_k=2) == {0, 1, 2}
        assert self.kept([1.0, 1.0, 1.0, 0.0], top_p=0.2) == {0, 1, 2}


class TestEdges:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((64, 40)), jnp.float32)

    @pytest.mark.parametrize("temperature", [0, 0.0, 1e-30, 1e-10, 5e-324])
    def test_no_temperature_is_the_largest_logit(self, temperature):
        found = sample(self.logits, KEY, temperature=temperature)
        assert np.array_equal(found, np.argmax(self.logits, axis=-1))

    def test_equal_largest_logits_give_the_first_at_temperature_0(self):
        assert sample(jnp.asarray([[1.0, 3.0, 3.0]]), KEY, temperature=0.0).tolist() == [1]

    @pytest.mark.parametrize("top_k", [40, 41, 10**9])
    def test_top_k_of_the_whole_vocabulary_is_off(self, top_k):
        assert np.array_equal(sample(self.logits, KEY, top_k=top_k), sample(self.logits, KEY))

    def test_top_k_beyond_32_bits_is_off(self):
        assert np.array_equal(jaxlm.sample(self.logits, KEY, top_k=10**12), sample(self.logits, KEY))

    def test_an_infinite_top_k_is_refused(self):
        with pytest.raises(RequestError, match="top_k"):
            jaxlm.sample(self.logits, KEY, top_k=np.inf)

    def test_top_k_1_and_a_tiny_top_p_are_the_largest_logit(self):
        best = np.argmax(self.logits, axis=-1)
        assert np.array_equal(sample(self.logits, KEY, top_k=1, temperature=9.0), best)
        assert np.array_equal(sample(self.logits, KEY, top_p=1e-8, temperature=9.0), best)

    def test_the_smallest_top_p_keeps_one_id(self):
        best = np.argmax(self.logits, axis=-1)
        assert np.array_equal(jaxlm.sample(self.logits, KEY, top_p=1e-50), best)

    def test_numbers_and_arrays_without_jit(self):
        found = jaxlm.sample(self.logits, KEY, temperature=2, top_k=np.full(64, 9), top_p=0.9, min_p=jnp.zeros(64))
        assert np.array_equal(found, sample(self.logits, KEY, temperature=2.0, top_k=9, top_p=0.9))

    @pytest.mark.parametrize("setting", [{"top_p": 0.0}, {"top_p": -1.0}, {"min_p": 2.0}])
    def test_at_least_one_id_is_kept_whatever_a_traced_setting_is(self, setting):
        best = np.argmax(self.logits, axis=-1)
        assert np.array_equal(sample(self.logits, KEY, **setting), best)

    def test_near_1_top_p_is_not_cut(self):
        logits = jnp.broadcast_to(jnp.asarray([[0.0, -15.0]]), (3, 2))
        kept = filter_logits(logits, jnp.ones(3), jnp.zeros(3, jnp.int32), jnp.full(3, 0.99999994), jnp.zeros(3))
        assert np.isfinite(np.asarray(kept)).all()

    @pytest.mark.parametrize(
        ("name", "bad"),
        [
            *(("temperature", v) for v in (-1.0, -1e-9, np.nan, np.inf, "1", None, True)),
            *(("top_k", v) for v in (-1, -5, 1.5, np.nan, "5", None)),
            *(("top_p", v) for v in (0, 0.0, -0.1, 1.01, np.nan, "x", None)),
            *(("min_p", v) for v in (-0.1, 1.01, np.nan, "x", None)),
        ],
    )
    def test_settings_out_of_range(self, name, bad):
        with pytest.raises(RequestError, match=rf"(?s){name} is .*allowed"):
            jaxlm.sample(self.logits, KEY, **{name: bad})
        if not isinstance(bad, (str, type(None), bool)):
            mixed = np.array([0.5 if name != "top_k" else 2] * 63 + [bad])
            with pytest.raises(RequestError, match=rf"(?s){name} is .*allowed"):
                jaxlm.sample(self.logits, KEY, **{name: mixed})

    @pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, "2"])
    def test_repetition_penalty_out_of_range(self, bad):
        with pytest.raises(RequestError, match="repetition_penalty"):
            check_settings(repetition_penalty=bad)

    @pytest.mark.parametrize("case", ["settings", "logits"])
    def test_shapes_that_do_not_fit(self, case):
        with pytest.raises(RequestError):
            if case == "settings":
                jaxlm.sample(self.logits, KEY, temperature=np.ones(3, np.float32))
            else:
                jaxlm.sample(self.logits[0], KEY)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_row_without_a_valid_choice_is_refused_alone(self, temperature):
        bad = [np.nan, np.inf, -np.nan]
        logits = np.array(self.logits)
        for row, value in enumerate(bad):
            logits[row, 7] = value
        logits[3] = -np.inf
        logits[4] = np.nan
        logits[5, :39] = -np.inf  # One id left: fine.
        found = sample(jnp.asarray(logits), KEY, temperature=temperature, top_k=9, top_p=0.9, min_p=0.01)
        plain = sample(self.logits, KEY, temperature=temperature, top_k=9, top_p=0.9, min_p=0.01)
        assert found[:6].tolist() == [REFUSED] * 5 + [39]
        assert np.array_equal(found[6:], plain[6:])

    def test_ids_at_minus_infinity_are_never_drawn(self):
        logits = jnp.where(jnp.arange(40)[None, :] % 2 == 0, -jnp.inf, self.logits)
        for seed in range(20):
            assert (sample(logits, jax.random.key(seed), temperature=50.0) % 2 == 1).all()

    @pytest.mark.parametrize("size", [1e-30, 1e30, 3e38])
    def test_logits_of_any_finite_size(self, size):
        logits = self.logits / jnp.max(jnp.abs(self.logits)) * size
        found = np.asarray(sample(logits, KEY, temperature=1.0, top_p=0.9))
        assert ((found >= 0) & (found < 40)).all()
        if size > 1:
            assert np.array_equal(found, np.argmax(logits, axis=-1))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_narrow_logits(self, dtype):
        logits = self.logits.astype(dtype)
        assert np.array_equal(sample(logits, KEY), sample(logits.astype(jnp.float32), KEY))


class TestRows:
    """A row's result follows from its own logits, settings and key alone."""

    logits = jnp.asarray(np.random.default_rng(1).standard_normal((16, 50)), jnp.float32)

    def test_by_one_key_a_rows_result_depends_on_its_index_not_on_the_batch(self):
        whole = sample(self.logits, KEY)
        for size in (1, 5, 16):
            assert np.array_equal(sample(self.logits[:size], KEY), whole[:size])

    @tiny.examples(30)
    @given(st.integers(0, 15), st.integers(0, 99), choices, choices)
    def test_neighbours_do_not_matter(self, row, seed, mine, theirs):
        """Other logits, other settings (greedy and NaN among them) and another size of the batch."""
        keys = row_keys(jax.random.key(seed), 16)
        alone = sample(self.logits[row][None], keys[row][None], *mine)
        other = np.array(self.logits[::-1])
        other[row] = self.logits[row]
        other[row - 1] = np.nan
        several = [(0.0, *theirs[1:]) if i % 3 == 0 else theirs for i in range(16)]
        several[row] = mine
        assert int(sample(other, keys, *zip(*several, strict=True))[row]) == int(alone[0])

    def test_equal_rows_draw_differently(self):
        equal = jnp.zeros((16, 1000))
        assert len(set(sample(equal, KEY).tolist())) > 13

    def test_seeds(self):
        first, again, other = (sample(self.logits, jax.random.key(seed)).tolist() for seed in (3, 3, 4))
        assert first == again != other

    def test_raw_keys_are_keys(self):
        raw = jax.random.PRNGKey(5)
        assert np.array_equal(sample(self.logits, raw), sample(self.logits, jax.random.wrap_key_data(raw)))
        keys = jax.random.split(raw, 16)
        assert np.array_equal(sample(self.logits, keys), sample(self.logits, jax.random.wrap_key_data(keys)))

    def test_settings_per_row(self):
        temperature = np.array([0.0] * 8 + [50.0] * 8, np.float32)
        draws = np.array([sample(self.logits, jax.random.key(seed), temperature=temperature) for seed in range(12)])
        assert (draws[:, :8] == np.argmax(np.asarray(self.logits[:8]), axis=-1)).all()
        assert all(len(set(column)) > 6 for column in draws[:, 8:].T)

    def test_each_key_is_used_once(self):
        with jax.debug_key_reuse(True):
            jax.block_until_ready(jax.jit(functools.partial(jaxlm.sample, top_k=5))(self.logits, jax.random.key(1)))

    def test_under_vmap(self):
        keys = jax.random.split(KEY, 2)
        draw = jax.jit(jax.vmap(lambda a, key: jaxlm.sample(a, key, top_k=7, top_p=0.9)))
        found = draw(self.logits.reshape(2, 8, 50), keys)
        for i in range(2):
            expected = sample(self.logits[8 * i : 8 * i + 8], keys[i], top_k=7, top_p=0.9)
            assert np.array_equal(found[i], expected)

    def test_without_jit_the_second_call_compiles_nothing(self):
        jaxlm.sample(self.logits, KEY, top_k=3)
        with tiny.count_compiles() as compiled:
            jaxlm.sample(self.logits, KEY, top_k=3)
        assert not compiled

    def test_no_setting_compiles_again(self):
        traced = jax.jit(lambda logits, key, *s: jaxlm.sample(
            logits, key, temperature=s[0], top_k=s[1], top_p=s[2], min_p=s[3]))  # fmt: skip
        for seed, choice in enumerate([(1.0, 0, 1.0, 0.0), (0.0, 5, 0.5, 0.2), (3.0, 60, 1e-8, 1.0)]):
            found = traced(self.logits, jax.random.key(seed), *choice)
            assert np.array_equal(found, sample(self.logits, jax.random.key(seed), *choice))
        assert traced._cache_size() == 1


class TestRepetitionPenalty:
    def test_example(self):
        logits, seen = jnp.asarray([[2.0, -2.0, 1.0]]), jnp.asarray([[True, True, False]])
        found = penalise_repeats(logits, seen, jnp.asarray([2.0]))
        assert found.tolist() == [[1.0, -4.0, 1.0]]

    @given(st.lists(rows, min_size=2, max_size=2), st.lists(st.booleans(), min_size=12, max_size=12), st.data())
    def test_each_row_by_its_own_penalty(self, logits, seen, data):
        penalty = data.draw(st.lists(st.sampled_from([0.5, 1.0, 1.3, 2.0]), min_size=2, max_size=2))
        seen = np.array(seen).reshape(2, 6)
        found = penalise_repeats(jnp.asarray(logits, jnp.float32), jnp.asarray(seen), jnp.asarray(penalty, jnp.float32))
        for i, v in np.ndindex(2, 6):
            x = logits[i][v]
            expected = x if not seen[i, v] else x / penalty[i] if x > 0 else x * penalty[i]
            np.testing.assert_allclose(found[i, v], expected, rtol=1e-6)
