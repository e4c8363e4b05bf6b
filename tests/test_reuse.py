"""Prefix reuse: answers are those without a store, whatever it holds; what it holds is bounded and never another's."""

import dataclasses
import gc
import threading

import jax
import numpy as np
import pytest
import scripted
import tiny
from hypothesis import given
from hypothesis import strategies as st

import jaxlm
from jaxlm import Model, PrefixStore, generate, loop, reuse, stream
from jaxlm.cache import can_cut_back
from jaxlm.config import DynamicScaling, LongRopeScaling
from jaxlm.errors import JaxlmError, JaxlmTypeError, RequestError
from jaxlm.loop import prefill_rows
from jaxlm.sizes import chunk_plan, slots_for


def with_rope(scaling) -> jaxlm.ModelConfig:
    rope = jaxlm.RopeSpec(scaling=scaling)
    attention = jaxlm.AttentionSpec(4, 2, 6, rope=rope)
    return tiny.config(*[jaxlm.LayerSpec(attention, jaxlm.FFNSpec(10))] * 2, max_positions=64)


LONG = with_rope(LongRopeScaling((1.0, 2.0, 3.0), (9.0, 5.0, 30.0), 24))
DYNAMIC = with_rope(DynamicScaling(4.0, 24))
CONFIGS = [tiny.ALTERNATE, tiny.OTHERS, LONG]


@pytest.fixture(autouse=True)
def short_prefixes_count(monkeypatch):
    monkeypatch.setattr(reuse, "LEAST_SHARED", 1)


def model_of(config) -> Model:
    return Model(config, tiny.known(config)[0])


def ids_of(model, prompts, **settings) -> list[list[int]]:
    return [answer.token_ids for answer in generate(model, prompts, **settings)]


class Counter:
    """How many tokens went through prefill."""

    def __init__(self, monkeypatch):
        self.tokens, run = 0, loop.prefill_chunk

        def counted(params, tokens, counts, *rest):
            self.tokens += int(counts.sum())
            return run(params, tokens, counts, *rest)

        monkeypatch.setattr(loop, "prefill_chunk", counted)

    def of(self, call) -> int:
        self.tokens = 0
        call()
        return self.tokens


@pytest.fixture
def counter(monkeypatch) -> Counter:
    return Counter(monkeypatch)


# --- Which cuts are possible ---


@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_a_ring_can_be_cut_back_while_it_has_what_comes_into_sight(kind):
    """Against a ring of positions, slot by slot: every position that a later token sees must lie in its slot."""
    for reach in (1, 2, 3, 4, 7):
        attention = dataclasses.replace(tiny.layer().attention, **{kind: reach})
        config = tiny.config(tiny.layer(), dataclasses.replace(tiny.layer(), attention=attention))
        for held in range(25):
            ring = {position % reach: position for position in range(held)}
            for wanted in range(held + 1):
                seen = range(wanted // reach * reach if kind == "chunk" else max(wanted - reach + 1, 0), wanted)
                there = all(ring[position % reach] == position for position in seen)
                assert can_cut_back(config, held, wanted) == there, (reach, held, wanted)
    assert can_cut_back(tiny.FULL, 1000, 3)


# --- Answers are the same ---


@tiny.examples(25)
@given(st.sampled_from(CONFIGS), st.data())
def test_answers_equal_those_without_a_store(config, data):
    """Batches of prompts that go on from, or leave, what earlier rows were, each row from another length."""
    model, store, before = model_of(config), PrefixStore(), [[1]]
    for _ in range(3):
        prompts = []
        for _ in range(2):
            earlier = data.draw(st.sampled_from(before))
            new = data.draw(st.lists(st.integers(0, tiny.VOCAB - 1), min_size=1, max_size=9))
            prompts.append((earlier[: data.draw(st.integers(0, len(earlier)))] + new)[:32])
        settings = {"max_new_tokens": 12, "temperature": data.draw(st.sampled_from([0.0, 1.0])), "ignore_eos": True}
        found = ids_of(model, prompts, reuse=store, **settings)
        assert found == ids_of(model, prompts, **settings)
        before += [prompt + ids for prompt, ids in zip(prompts, found, strict=True)]


@pytest.mark.parametrize("config", CONFIGS, ids=["alternate", "others", "long"])
def test_hidden_states_equal_those_without_a_store(config, counter):
    """Each row from another start: 2e-5 apart at most."""
    model, store = model_of(config), PrefixStore()
    ids = tiny.random_tokens((40,), 3).tolist()
    generate(model, [ids[:9], ids[20:26]], max_new_tokens=2, reuse=store)
    prompts = [ids[:14], ids[20:32]]
    plain, _ = prefill_rows(model.params, config, prompts, 256)
    assert counter.of(lambda: prefill_rows(model.params, config, prompts, 256, store)) == 14 + 12 - 9 - 6
    found, cache = prefill_rows(model.params, config, [[*ids[:12], 1, 2], ids[20:32]], 256, store)
    assert tiny.relative_error(found[1], plain[1]) < 2e-5
    assert cache.lengths.tolist() == [14, 12]


def test_rows_go_between_caches_of_any_size(counter):
    """From 1024 slots into 256 and back, past the window, over several chunks, and on into a cache that grows."""
    config = tiny.config(tiny.layer(300), tiny.layer())
    model, store = Model(config, tiny.random_params(config, 3)), PrefixStore()
    ids = np.random.default_rng(0).integers(0, tiny.VOCAB, 800).tolist()
    for first, last, new in ((0, 700, 4), (0, 90, 200), (0, 705, 400), (5, 600, 2), (0, 90, 3)):
        prompt = ids[first:last]
        found = ids_of(model, [prompt], max_new_tokens=new, reuse=store)
        assert found == ids_of(model, [prompt], max_new_tokens=new)
    assert counter.of(lambda: generate(model, [ids[:705]], max_new_tokens=1, reuse=store)) == 1


def test_the_plan_covers_rows_that_start_anywhere():
    @tiny.examples(100)
    @given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 1300)), min_size=1, max_size=3))
    def check(rows):
        starts, lengths = [s for s, _ in rows], [s + rest for s, rest in rows]
        slots = slots_for(max(lengths))
        ends = list(starts)
        for done, width, read in chunk_plan(starts, lengths, slots):
            assert read >= min(max(ends), slots) and (read or not any(ends))
            assert all(end == min(s + done, n) for end, s, n in zip(ends, starts, lengths, strict=True))
            ends = [min(end + width, n) for end, n in zip(ends, lengths, strict=True)]
        assert ends == lengths

    check()


# --- Rows that were computed otherwise are not taken ---


@pytest.mark.parametrize("config", [LONG, DYNAMIC], ids=["long", "dynamic"])
def test_other_frequencies_are_another_prefix(config, counter):
    """A prompt beyond the original context takes nothing from one within it, nor the other way round."""
    model, ids = model_of(config), tiny.random_tokens((40,), 5).tolist()
    for first, second, run in ((20, 30, 30), (30, 20, 20), (20, 24, 4)):
        store = PrefixStore()
        generate(model, [ids[:first]], max_new_tokens=1, reuse=store)
        assert counter.of(lambda n=second, s=store: generate(model, [ids[:n]], max_new_tokens=1, reuse=s)) == run
    store = PrefixStore()
    generate(model, [ids[:30]], max_new_tokens=1, reuse=store)
    tokens = counter.of(lambda: generate(model, [ids[:35]], max_new_tokens=1, reuse=store))
    assert tokens == (35 if config is DYNAMIC else 5)


def test_a_store_serves_several_models_and_mixes_none(counter):
    model, store, prompt = model_of(tiny.FULL), PrefixStore(), list(range(10))
    others = [
        Model(tiny.FULL, tiny.random_params(tiny.FULL, 8)),
        Model(dataclasses.replace(tiny.FULL, logit_scale=2.0), model.params),
        Model(tiny.FULL, model.params | {"embed": {"table": model.params["embed"]["table"] * 1.01}}),
        model_of(tiny.ALTERNATE),
    ]
    generate(model, [prompt], reuse=store, max_new_tokens=1)
    for other in others:
        assert ids_of(other, [prompt], reuse=store, max_new_tokens=9) == ids_of(other, [prompt], max_new_tokens=9)
    assert len(store) == 1 + len(others) + 1  # With rings the prompt has a row of its own.
    for each in (model, dataclasses.replace(model, name="the same"), *others):
        if each.config is not others[-1].config:
            assert counter.of(lambda m=each: generate(m, [prompt], reuse=store, max_new_tokens=1)) == 1


def test_a_store_does_not_keep_a_model_alive():
    store, params = PrefixStore(), tiny.random_params(tiny.FULL, 9)
    generate(Model(tiny.FULL, params), [[1, 2, 3]], reuse=store, max_new_tokens=1)
    assert len(store) == 1
    del params
    gc.collect()
    generate(model_of(tiny.FULL), [[1, 2, 3]], reuse=store, max_new_tokens=1)
    assert len(store) == 1


# --- What is kept ---


def test_a_longer_row_takes_the_place_of_the_shorter_one(counter):
    model, store = model_of(tiny.FULL), PrefixStore()
    answer = generate(model, [[1, 2, 3]], reuse=store, max_new_tokens=6)[0]
    whole = answer.prompt_ids + answer.token_ids
    bytes_of_one = store.nbytes
    assert (len(store), bytes_of_one) == (1, 2 * 2 * 256 * 2 * 6 * 4)  # K and V, layers, slots, heads, width, float32.
    assert counter.of(lambda: generate(model, [[*whole, 5]], reuse=store, max_new_tokens=1)) == 2  # The last id too.
    generate(model, [[1, 2, 3]], reuse=store, max_new_tokens=6)
    assert (len(store), store.nbytes) == (1, bytes_of_one)
    generate(model, [[2, 2, 3], [3, 3]], reuse=store, max_new_tokens=6)
    assert (len(store), store.nbytes) == (3, 3 * bytes_of_one)
    store.clear()
    assert (len(store), store.nbytes) == (0, 0)


def test_rings_keep_the_prompt_as_well(counter):
    """The row of an answer that ran over its ring cannot be cut back to the prompt, so that has a row of its own."""
    model, store, prompt = model_of(tiny.WINDOWED), PrefixStore(), [5, 4, 3, 2, 1, 0]
    generate(model, [prompt], reuse=store, max_new_tokens=9, ignore_eos=True)
    assert counter.of(lambda: generate(model, [[*prompt, 9, 9]], reuse=store, max_new_tokens=1)) == 2


def test_the_least_recently_used_rows_go_first(counter):
    model = model_of(tiny.FULL)
    store = PrefixStore(max_bytes=3 * 2 * 2 * 256 * 2 * 6 * 4)
    rows = [[first, 1, 2, 3] for first in range(4)]
    for row in (rows[0], rows[1], rows[2], rows[0], rows[3]):
        generate(model, [row], reuse=store, max_new_tokens=1)
        assert store.nbytes <= store.max_bytes
    assert len(store) == 3
    found = [counter.of(lambda r=row: prefill_rows(model.params, model.config, [r], 256, store)) for row in rows]
    assert found == [1, 4, 1, 1]
    for small in (PrefixStore(max_bytes=0), PrefixStore(max_bytes=100)):
        generate(model, [rows[0]], reuse=small, max_new_tokens=1)
        assert len(small) == 0


def test_few_tokens_are_not_worth_a_copy(counter, monkeypatch):
    monkeypatch.setattr(reuse, "LEAST_SHARED", 16)
    model, store, ids = model_of(tiny.FULL), PrefixStore(), [3] * 16
    generate(model, [ids], reuse=store, max_new_tokens=1)
    for prompt, tokens in (([*ids[:15], 1, 1], 17), ([*ids, 1, 1], 2)):
        assert counter.of(lambda p=prompt: generate(model, [p], reuse=store, max_new_tokens=1)) == tokens


# --- Streams, interruptions, threads ---


def test_an_abandoned_stream_is_kept(counter):
    model, store = scripted.random_model(), PrefixStore()
    pieces = stream(model, [1, 2, 3], reuse=store, max_new_tokens=100, ignore_eos=True)
    for _ in range(5):
        next(pieces)
    assert len(store) == 0
    pieces.close()
    del pieces
    ids = ids_of(model, [[1, 2, 3]], max_new_tokens=5, ignore_eos=True)[0]
    assert len(store) == 1
    assert counter.of(lambda: generate(model, [[1, 2, 3, *ids]], reuse=store, max_new_tokens=1)) <= 2
    assert ids_of(model, [[1, 2, 3]], reuse=store) == ids_of(model, [[1, 2, 3]])


def test_an_interrupted_loop_leaves_the_store_as_it_was(monkeypatch):
    model, store = model_of(tiny.FULL), PrefixStore()
    generate(model, [[1, 2, 3]], reuse=store, max_new_tokens=4)
    decode_loop = loop.decode_loop

    def interrupted(*arguments):
        decode_loop(*arguments)  # It has taken the cache.
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "decode_loop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(model, [[1, 2, 3, 4, 5]], reuse=store, max_new_tokens=4)
    monkeypatch.undo()
    assert len(store) == 1
    assert ids_of(model, [[1, 2, 3, 4, 5]], reuse=store) == ids_of(model, [[1, 2, 3, 4, 5]])


def test_a_row_whose_logits_were_nan_is_not_kept():
    model = scripted.walk_model({1: 2, 2: 3, 3: 4})
    table = model.params["embed"]["table"].at[4].set(np.nan)
    broken, store = dataclasses.replace(model, params=model.params | {"embed": {"table": table}}), PrefixStore()
    with pytest.raises(JaxlmError, match="prompt 1"):
        generate(broken, [[9], [1]], reuse=store, max_new_tokens=9)
    assert len(store) == 1
    assert broken.params is not model.params and ids_of(broken, [[1]], reuse=store, max_new_tokens=2) == [[2, 3]]


def test_threads_share_a_store():
    model, store = scripted.random_model(), PrefixStore(max_bytes=200_000)
    prompts = [[row % 3, 5, 6, row, 7] for row in range(12)]
    expected, found = ids_of(model, prompts, max_new_tokens=8, seed=[0] * 12), {}

    def work(part):
        for row in range(part, 12, 3):
            found[row] = ids_of(model, [prompts[row]], max_new_tokens=8, reuse=store)[0]

    threads = [threading.Thread(target=work, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[row] for row in range(12)] == expected and store.nbytes <= store.max_bytes


# --- The rest ---


def test_nothing_compiles_after_warm_up():
    config = tiny.config(tiny.layer(40), tiny.layer(), max_positions=1024)
    model, store = Model(config, tiny.random_params(config)), PrefixStore()
    jaxlm.warmup(model, max_len=160, reuse=True)
    rng, before = np.random.default_rng(1), [[1, 2, 3]]
    with jaxlm.compile_ledger(forbid=True):
        for _ in range(12):
            earlier = before[rng.integers(len(before))]
            more = rng.integers(0, 13, rng.integers(1, 60)).tolist()
            prompt = (earlier[: rng.integers(len(earlier) + 1)] + more)[:150]
            new = int(rng.integers(1, 161 - len(prompt)))
            before.append(prompt + ids_of(model, [prompt], max_new_tokens=new, reuse=store)[0])
    assert len(store) > 3


@pytest.mark.parametrize("bad", [-1, 1.5, "1", None, True])
def test_bad_sizes(bad):
    with pytest.raises(RequestError, match="max_bytes"):
        PrefixStore(max_bytes=bad)


@pytest.mark.parametrize("bad", [True, {}, "store"])
def test_bad_stores(bad):
    for call in (generate, stream):
        with pytest.raises(JaxlmTypeError, match="reuse is"):
            call(scripted.flat_model(), "x", reuse=bad)


def test_rows_are_copies():
    """The caller's cache and what the store holds share no memory that the loop gives up."""
    model, store = model_of(tiny.FULL), PrefixStore()
    generate(model, [[1, 2, 3]], reuse=store, max_new_tokens=4)
    kept = [np.asarray(leaf).copy() for entry in store._entries for leaf in jax.tree.leaves(entry.layers)]
    generate(model, [[1, 2, 3, 9, 9]], reuse=store, max_new_tokens=40)
    for entry in store._entries[:1]:
        for leaf, before in zip(jax.tree.leaves(entry.layers), kept, strict=True):
            assert not leaf.is_deleted() and np.array_equal(leaf, before)
