"""Speculative decoding: the answer is the plain one, token by token and in distribution, whoever guesses whatever."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scripted
import tiny
from hypothesis import given
from hypothesis import strategies as st
from scripted import EOS
from test_reuse import DYNAMIC, LONG

import jaxlm
from jaxlm import JaxlmError, Model, PrefixStore, generate, loop, reuse, speculate, stream
from jaxlm.config import ModelConfig
from jaxlm.errors import JaxlmTypeError, RequestError
from jaxlm.generate import check_request, lay_out, make_decoder
from jaxlm.loop import token_chunks
from jaxlm.speculate import LONGEST_MATCH, SHORTEST_MATCH, look_up, speculative_loop

COUNT = 3


@functools.cache
def model_of(config: ModelConfig, seed: int = 1, eos: int = 5) -> Model:
    return Model(config, tiny.random_params(config, seed), eos_ids=(eos,))


def ids_of(model, prompts, **settings) -> list[list[int]]:
    return [answer.token_ids for answer in generate(model, prompts, **settings)]


def steps_of(model: Model, prompt: list[int], draft, count: int = COUNT, **settings) -> list[int]:
    """How many ids each step brings."""
    decoder, request = make_decoder(model, draft, count), check_request(**settings)
    chunks = token_chunks(decoder, [prompt], lay_out(model, [prompt], request), 1)
    return [len(new[0]) for new, _ in chunks][1:]


# --- The same answers ---

ids = st.lists(st.integers(0, tiny.VOCAB - 1), min_size=1, max_size=16)
PAIRS = [
    (model_of(tiny.OTHERS), "lookup"),
    (model_of(LONG), "lookup"),
    (model_of(DYNAMIC), "lookup"),
    (model_of(tiny.ALTERNATE), model_of(tiny.ALTERNATE, 2)),
]


@pytest.mark.parametrize(
    ("model", "draft"), PAIRS, ids=["others", "long", "dynamic", "rings"]
)
@tiny.examples(8)
@given(st.lists(ids, min_size=2, max_size=2), st.data())
def test_answers_are_the_plain_ones(model, draft, prompts, data):
    """Two rows with settings of their own, drawn or greedy, to the end of the answer or of the context."""
    def each(*values):
        return [data.draw(st.sampled_from(values)) for _ in prompts]

    settings = {
        "temperature": each(0.0, 0.3, 1.0), "top_k": each(0, 3), "top_p": each(1.0, 0.8), "min_p": each(0.0, 0.1),
        "repetition_penalty": each(1.0, 1.3), "seed": data.draw(st.integers(0, 2**32 - 1)),
        "ignore_eos": data.draw(st.booleans()), "max_new_tokens": data.draw(st.integers(1, 60)),
    }  # fmt: skip
    plain = generate(model, prompts, **settings)
    assert generate(model, prompts, draft=draft, draft_tokens=COUNT, **settings) == plain


def test_what_guesses_bring():
    """A model that guesses for itself is always right; a look-up is as soon as the row repeats itself."""
    model = model_of(tiny.ALTERNATE)
    for settings in ({}, {"temperature": 1.0}, {"repetition_penalty": 1.5}):
        assert steps_of(model, [3, 1], model, max_new_tokens=22, ignore_eos=True, **settings) == [4] * 5 + [1]
    circle = scripted.walk_model({1: 2, 2: 3, 3: 4, 4: 1})
    assert steps_of(circle, [1], "lookup", max_new_tokens=20) == [1] * 4 + [4] * 3 + [3]
    assert steps_of(circle, [1, 2, 3, 4, 1], "lookup", max_new_tokens=9) == [4, 4]
    straight = scripted.walk_model({i: i + 1 for i in range(100)})
    assert steps_of(straight, [1], "lookup", max_new_tokens=9) == [1] * 8
    assert steps_of(straight, [1], circle, max_new_tokens=9) == [3, *[1] * 5]  # It knows 3 and 4, and so 5 comes.


def test_the_limit_the_end_and_stop_strings():
    """In the middle of what one step brings."""
    script = scripted.walk_model({1: 65, 65: 66, 66: 67, 67: 68, 68: 69, 69: 70, 70: EOS, EOS: 65})
    for settings in (
        *({"max_new_tokens": limit} for limit in range(9)), {"stop": "CD"}, {"stop": ["F", "D"]}, {"stop": "EFG"},
        {"max_new_tokens": 20, "ignore_eos": True}, {"stop": "AB", "max_new_tokens": 12, "ignore_eos": True},
    ):  # fmt: skip
        plain = generate(script, [[1]], **settings)
        assert generate(script, [[1]], draft=script, draft_tokens=4, **settings) == plain
        assert "".join(stream(script, [1], draft=script, draft_tokens=4, **settings)) == plain[0].text


def test_caches_grow():
    """Past 256 slots, one row a good deal shorter; the draft's cache and the ids looked up grow along."""
    config = tiny.config(tiny.layer(300), tiny.layer(), max_positions=1024)
    model, draft = model_of(config), model_of(tiny.config(tiny.layer(40), tiny.layer(), max_positions=1024), 1)
    prompts = [tiny.random_tokens((n,), n).tolist() for n in (100, 20)]
    settings = {"max_new_tokens": 200, "ignore_eos": True, "temperature": 0.3}
    plain = ids_of(model, prompts, **settings)
    for guesser in ("lookup", draft):
        assert ids_of(model, prompts, draft=guesser, **settings) == plain


# --- The same distribution ---

DRAWS = 6000
SMALL = ModelConfig(5, 8, (tiny.layer(),), max_positions=64)


def chi_square(found: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean."""
    found, expected = found[expected > 0], expected[expected > 0]
    statistic = ((found - expected) ** 2 / expected).sum()
    return float((statistic - (len(found) - 1)) / (2 * (len(found) - 1)) ** 0.5)


@functools.cache
def exact(top_k: int) -> np.ndarray:
    """The probabilities of all three first tokens after the prompt, [5,5,5], from one pass over each prefix."""
    rows = np.array([[*PROMPT, a, b] for a in range(5) for b in range(5)], np.int32)
    logits = np.asarray(tiny.forward(small(0).params, rows, SMALL), np.float64)[:, -3:]
    kept = np.where(logits >= np.sort(logits)[..., -(top_k or 5), None], logits, -np.inf)
    p = np.exp(kept) / np.exp(kept).sum(-1, keepdims=True)
    first, second, third = p[:, 0].reshape(5, 5, 5)[0, 0], p[:, 1].reshape(5, 5, 5)[:, 0], p[:, 2].reshape(5, 5, 5)
    return first[:, None, None] * second[:, :, None] * third


PROMPT = [0, 1, 2, 0, 1, 2, 0, 1]


def small(seed: int) -> Model:
    params = tiny.random_params(SMALL, seed)
    return Model(SMALL, params | {"lm_head": {"table": params["lm_head"]["table"] * 0.3}})


def deviation(draft, count: int, top_k: int = 0) -> float:
    rows = ids_of(
        small(0), [PROMPT] * DRAWS, temperature=1.0, top_k=top_k, max_new_tokens=3, draft=draft, draft_tokens=count
    )
    found = np.zeros((5, 5, 5))
    np.add.at(found, tuple(np.array(rows).T), 1)
    assert not found[exact(top_k) == 0].any()
    return chi_square(found, exact(top_k) * DRAWS)


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("draft", ["lookup", small(1)], ids=["lookup", "model"])
def test_the_distribution_is_the_models(draft, top_k):
    assert deviation(draft, 2, top_k) < 5


@pytest.mark.parametrize("draft", ["lookup", small(1)], ids=["lookup", "model"])
def test_a_wrong_rule_is_found_out(draft, monkeypatch):
    """Guesses that are favoured a little."""
    choose_on = speculate.choose_on

    def lenient(logits, tokens, *rest):
        return choose_on(logits.at[:, :-1].add(0.5 * jax.nn.one_hot(tokens[:, 1:], 5)), tokens, *rest)

    monkeypatch.setattr(speculate, "choose_on", lenient)
    try:
        assert deviation(draft, 1) > 20
    finally:
        speculative_loop.clear_cache()


def test_a_draft_model_agrees_about_as_often_as_can_be():
    """The share of rows whose first guess stays, against one minus the total variation, the most there can be."""
    model, draft = small(0), small(1)
    rows = [PROMPT] * DRAWS
    settings = lay_out(model, rows, check_request(len(rows), temperature=1.0, max_new_tokens=3))
    chunks = token_chunks(make_decoder(model, draft, 1), rows, settings, 1)
    next(chunks)
    share = np.mean([len(new) == 2 for new in next(chunks)[0]])
    after = np.array([[*PROMPT, first] for first in range(5)], np.int32)
    p, q = (np.asarray(jax.nn.softmax(tiny.forward(m.params, after, SMALL)[:, -1])) for m in (model, draft))
    apart = np.abs(p - q).sum(-1) / 2 @ exact(0).sum((1, 2))
    assert 0.05 < apart < 0.6
    assert (1 - apart) / (1 + apart) - 0.02 < share < 1 - apart + 0.02


# --- Looking up ---


def looked_up(row: list[int], count: int) -> list[int]:
    """In plain words: the longest of the last ids that stood before, the latest time they did, and what came next."""
    for size in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        for end in range(len(row) - 1, size - 1, -1):
            if row[end - size : end] == row[len(row) - size :]:
                new = list(row)
                for i in range(count):
                    new.append(new[end + i])
                return new[len(row) :]
    return []


@tiny.examples(150)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=3, max_size=3), st.integers(0, 2**31))
def test_look_up(rows, noise):
    held = tiny.random_tokens((3, 24), noise, 3)
    for row, values in enumerate(rows):
        held[row, : len(values) - 1] = values[:-1]
    lengths, last = np.array([len(v) - 1 for v in rows], np.int32), np.array([v[-1] for v in rows], np.int32)
    guesses, found = jitted_look_up(held, lengths, last)
    for values, guessed, count in zip(rows, guesses.tolist(), found.tolist(), strict=True):
        assert guessed[:count] == looked_up(values, 5)


jitted_look_up = jax.jit(functools.partial(look_up, count=5))


# --- Logits that cannot be used ---


def broken_at(model: Model, token: int) -> Model:
    table = model.params["embed"]["table"].at[token].set(np.nan)
    return dataclasses.replace(model, params=model.params | {"embed": {"table": table}})


def test_nan_of_a_guess_that_is_not_kept_does_no_harm():
    """And NaN of the row itself is refused as ever. Every guess of the draft is the broken id, or leads to it."""
    walk = {1: 2, 2: 3, 3: 5, 5: 6, 6: 7, 7: 8, 8: EOS}
    model = broken_at(scripted.walk_model(walk), 4)
    for guessed in (dict.fromkeys(range(9), 4), {**walk, 5: 4, 4: 4}, walk):
        draft = scripted.walk_model(guessed)
        settings = {"draft": draft, "draft_tokens": 3}
        assert ids_of(model, [[1], [3]], **settings) == [[2, 3, 5, 6, 7, 8, EOS], [5, 6, 7, 8, EOS]]
        assert "".join(stream(model, [3], **settings)) == "\x05\x06\x07\x08"
        worse = broken_at(model, 7)
        with pytest.raises(JaxlmError, match="prompt 1: the logits of new token 5 hold NaN"):
            generate(worse, [[8], [2]], **settings)
        assert ids_of(worse, [[8], [2]], max_new_tokens=4, **settings)[1] == [3, 5, 6, 7]


def test_a_draft_that_knows_nothing_from_some_point_on():
    model = scripted.random_model()
    short = scripted.script_model(b"").config  # Beyond 64 positions its logits are NaN.
    draft = Model(short, tiny.random_params(short), scripted.tokenizer())
    plain = generate(model, [[1, 2], [3]], max_new_tokens=70)
    assert generate(model, [[1, 2], [3]], max_new_tokens=70, draft=draft, draft_tokens=2) == plain


# --- With a store, warm, and in place ---


def test_with_a_store(monkeypatch):
    """Both models start from what is kept of them."""
    monkeypatch.setattr(reuse, "LEAST_SHARED", 1)
    model, draft, store = model_of(tiny.FULL), model_of(tiny.ALTERNATE), PrefixStore()
    prompt, settings = [1, 2, 3, 4, 5], {"max_new_tokens": 9, "ignore_eos": True, "draft_tokens": COUNT}
    for guesser in ("lookup", draft, draft):
        found = ids_of(model, [prompt], draft=guesser, reuse=store, **settings)[0]
        assert [found] == ids_of(model, [prompt], max_new_tokens=9, ignore_eos=True)
        prompt = [*prompt, *found, 7]
    tokens, run = [], loop.prefill_chunk
    monkeypatch.setattr(loop, "prefill_chunk", lambda p, t, counts, *rest: tokens.append(int(counts.sum())) or run(
        p, t, counts, *rest))  # fmt: skip
    generate(model, [prompt], draft=draft, reuse=store, **settings)
    assert tokens[0] == 2 and tokens[1] <= 1 + COUNT + 1  # The draft has not seen the last tokens of the answer.


def test_nothing_compiles_after_warm_up():
    model, draft = (Model(c, tiny.random_params(c)) for c in (SMALL, dataclasses.replace(SMALL, logit_scale=0.5)))
    for guesser in ("lookup", draft):
        jaxlm.warmup(model, max_len=64, draft=guesser, draft_tokens=2, reuse=True)
        store = PrefixStore()
        with jaxlm.compile_ledger(forbid=True):
            for n in (1, 20, 40):
                settings = {"temperature": n % 2, "max_new_tokens": 20, "draft": guesser, "draft_tokens": 2}
                generate(model, [PROMPT * 3 + [n % 5] * n][:1], reuse=store, **settings) if n < 40 else None
                list(stream(model, [1] * n, reuse=store, **settings))


@pytest.mark.parametrize("drafted", [False, True])
def test_the_caches_are_updated_in_place(drafted):
    model = model_of(tiny.FULL)
    decoder = make_decoder(model, model if drafted else "lookup", COUNT)
    settings = lay_out(model, [[1]], check_request(max_new_tokens=5))
    state = decoder.start([[1]], settings, 256, None)
    draft = (model.params, model.config) if drafted else (None, None)
    limits = jnp.int32(3), jnp.int32(9)
    lowered = speculative_loop.lower(model.params, draft[0], state, settings, *limits, model.config, draft[1], COUNT)
    text = lowered.compile().as_text()
    alias = text.split("input_output_alias={", 1)[1].split("entry_computation_layout", 1)[0]
    assert alias.count("-alias)") == len(jax.tree.leaves(state))
    copies = [line for line in text.splitlines() if " copy(" in line and "f32[2,1,256,2,6]" in line]
    assert not copies


# --- Bad input ---


@pytest.mark.parametrize("bad", [0, -1, 1.5, None, True, 65, "4"])
def test_bad_counts(bad):
    for call in (generate, stream):
        with pytest.raises(RequestError, match="draft_tokens is"):
            call(scripted.flat_model(), "x", draft="lookup", draft_tokens=bad)


@pytest.mark.parametrize("bad", ["look", 5, True, {}, np.zeros(3), np.array("lookup")], ids=repr)
def test_bad_drafts(bad):
    for call in (generate, stream):
        with pytest.raises(JaxlmTypeError, match="draft is"):
            call(scripted.flat_model(), "x", draft=bad)


def test_a_draft_shares_the_vocabulary():
    model = scripted.flat_model()
    with pytest.raises(RequestError, match="draft has a vocabulary of 300 ids; allowed: 258"):
        generate(model, "x", draft=scripted.flat_model(300))
    other = dataclasses.replace(model, tokenizer=scripted.tokenizer(bos=False))
    with pytest.raises(RequestError, match="draft reads id 256 as '<pad>'; allowed: '<bos>'"):
        generate(model, "x", draft=other)
    generate(model, "x", draft=dataclasses.replace(model, tokenizer=None), max_new_tokens=1)
