"""Streamed text equals whole text, and stop strings cut where a search of the whole text says."""

import pytest
import vocabularies
from hypothesis import given
from hypothesis import strategies as st

from jaxlm.detokenize import Detokenizer, StopStrings
from jaxlm.errors import JaxlmError
from jaxlm.tokenizer import Tokenizer

BYTE = Tokenizer.from_files(vocabularies.byte_level_files())
SPM = Tokenizer.from_files(vocabularies.sentencepiece_files())
KINDS = pytest.mark.parametrize("tokenizer", [BYTE, SPM], ids=["byte", "spm"])


def stream(tokenizer, prompt, out, **options):
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    return [*map(detokenizer.feed, out), detokenizer.flush()]


@KINDS
@given(st.data(), st.booleans())
def test_pieces_join_to_the_difference_of_the_whole_texts(tokenizer, data, keep):
    some = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12)
    prompt, out = data.draw(some), data.draw(some)
    before = tokenizer.decode(prompt, keep_special=keep)
    whole = tokenizer.decode(prompt + out, keep_special=keep)
    text = "".join(stream(tokenizer, prompt, out, keep_special=keep))
    if before.endswith("\ufffd"):  # a character begun in the prompt comes whole with the output
        assert whole.endswith(text)
    else:
        assert before + text == whole


@KINDS
@given(st.text(st.sampled_from("a 你好🙂é\n한"), min_size=1, max_size=12))
def test_no_piece_holds_half_a_character(tokenizer, text):
    pieces = stream(tokenizer, [], tokenizer.encode(text, special=False))
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces) and pieces[-1] == ""


@KINDS
@given(st.data())
def test_cut_characters(tokenizer, data):
    """Prompt and output may both end within a character."""
    ids = tokenizer.encode("\u2603" + "🎉𝄞é" * 2, bos=False)
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(ids))] * 2)))
    bytes_of = [tokenizer.token_bytes(i) for i in ids]
    start = len(b"".join(bytes_of[:first]).decode("utf-8", "ignore").encode())  # where the character begun last begins
    expected = b"".join(bytes_of[:last])[start:].decode("utf-8", "replace")
    if first == last:
        expected = expected and "\ufffd"
    if start == 0 and first == 0 and tokenizer.strips_space:
        expected = expected.removeprefix(" ")
    assert "".join(stream(tokenizer, ids[:first], ids[first:last])) == expected


def test_first_space_depends_on_the_prompt():
    hi = SPM.encode("hi", bos=False)
    assert "".join(stream(SPM, [], hi)) == "hi"
    assert "".join(stream(SPM, [SPM.bos_id], hi)) == "hi"
    assert "".join(stream(SPM, SPM.encode("hi"), hi)) == " hi"


def test_only_the_needed_ids_are_looked_at():
    looked: list[int] = []

    class Counting:
        strips_space = False

        def token_bytes(self, token, keep_special):
            looked.append(token)
            return b"a"

    detokenizer = Detokenizer(Counting(), range(10_000))
    assert len(looked) < 20
    del looked[:]
    for token in range(500):
        detokenizer.feed(token)
    assert len(looked) == 500


def feed(stops, pieces):
    stopper = StopStrings(stops)
    out = [stopper.feed(piece) for piece in pieces]
    return [*out, stopper.flush()], stopper.stopped


words = st.text(st.sampled_from("ab世"), max_size=5)


@given(st.lists(words, max_size=10), st.lists(words.filter(bool), max_size=3))
def test_stop_strings_cut_where_a_search_of_the_whole_text_cuts(pieces, stops):
    text = "".join(pieces)
    complete = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    out, stopped = feed(stops, pieces)
    assert "".join(out) == (text[: min(complete)[1]] if complete else text)
    assert stopped == bool(complete)


@given(st.lists(words, max_size=10), st.lists(words.filter(bool), min_size=1, max_size=3))
def test_what_was_shown_is_never_part_of_a_stop_and_little_is_held_back(pieces, stops):
    stopper, shown, seen = StopStrings(stops), "", ""
    for piece in pieces:
        seen += piece
        shown += stopper.feed(piece)
        assert not any(stop in shown for stop in stops)
        if not stopper.stopped:
            assert len(seen) - len(shown) < max(map(len, stops))


def test_known_cases_of_stop_strings():
    assert feed(["ab"], ["a", "a", "b"])[0] == ["", "a", "", ""]
    assert feed(["DEFGHIJ"], list("DEFGHI"))[0] == [""] * 6 + ["DEFGHI"]
    assert feed("\n\n", ["x\n", "y\n", "\nz"]) == (["x", "\ny", "", ""], True)
    ids = BYTE.encode("go 世界")
    detokenizer, stopper = Detokenizer(BYTE), StopStrings("世")
    assert "".join(stopper.feed(detokenizer.feed(i)) for i in ids) == "go " and stopper.stopped
    assert stopper.feed("more") == "" and stopper.flush() == ""


@pytest.mark.parametrize("stops", ["", ["a", ""], [1], [None]])
def test_bad_stop_strings_are_refused(stops):
    with pytest.raises(JaxlmError, match="stop"):
        StopStrings(stops)
