"""Text to ids and back, for both engines, against the libraries' own results and by laws."""

import json

import numpy as np
import pytest
import vocabularies
from hypothesis import given
from hypothesis import strategies as st

from jaxlm.errors import TokenizerError
from jaxlm.tokenizer import Tokenizer

BYTE = Tokenizer.from_files(vocabularies.byte_level_files())
BYTE_BOS = Tokenizer.from_files(vocabularies.byte_level_files(bos=True))
SPM = Tokenizer.from_files(vocabularies.sentencepiece_files())
SPM_BARE = Tokenizer.from_files(vocabularies.sentencepiece_files(dummy_prefix=False))
ALL = [BYTE, BYTE_BOS, SPM, SPM_BARE]
KINDS = pytest.mark.parametrize("tokenizer", ALL, ids=["byte", "byte_bos", "spm", "spm_bare"])

alphabet = st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("ab the<>|_ \n\u2581你🙂'1"))
parts = st.one_of(st.text(alphabet, max_size=8), st.sampled_from([*vocabularies.CONTROL, "<turn>", "<0x0A>", "  "]))
texts = st.lists(parts, max_size=8).map("".join)


def without_tokens(text: str) -> str:
    for token in [*vocabularies.CONTROL, *vocabularies.WORDS, "<unk>", "\u2581"]:
        text = text.replace(token, "")
    return text


@KINDS
@given(texts)
def test_plain_text_round_trips_and_holds_no_control_token(tokenizer, text):
    if tokenizer in (SPM, SPM_BARE):
        text = text.replace("\u2581", "_")  # these vocabularies cannot tell it from a space
    ids = tokenizer.encode(text, bos=False, special=False)
    assert tokenizer.decode(ids, keep_special=True) == text
    assert not tokenizer.special_ids & set(ids)


@given(texts.map(without_tokens))
def test_ids_are_the_libraries_ids(text):
    import sentencepiece
    import tokenizers

    core = tokenizers.Tokenizer.from_str(vocabularies.byte_level_json().decode())
    assert BYTE.encode(text) == core.encode(text).ids
    assert BYTE.decode(BYTE.encode(text)) == core.decode(BYTE.encode(text))
    model = sentencepiece.SentencePieceProcessor(model_proto=vocabularies.sentencepiece_model())
    assert SPM.encode(text, bos=False) == model.encode(text)
    assert SPM.decode(SPM.encode(text)) == model.decode(model.encode(text))


@KINDS
@given(st.data())
def test_any_ids_decode_to_the_utf8_of_their_bytes(tokenizer, data):
    ids = data.draw(st.lists(st.integers(-2, tokenizer.vocab_size + 3), max_size=20))
    text = b"".join(tokenizer.token_bytes(i, keep_special=False) for i in ids).decode("utf-8", "replace")
    assert tokenizer.decode(ids) == (text[1:] if tokenizer is SPM and text.startswith(" ") else text)


def test_byte_tokens_and_the_text_that_looks_like_one():
    text, ids = "hi\n🎉", SPM.encode("hi\n🎉")
    assert [SPM.token_text(i) for i in ids[-4:]] == ["<0xF0>", "<0x9F>", "<0x8E>", "<0x89>"] and SPM.decode(ids) == text
    assert SPM.decode([SPM._vocab.token_id("<0x0A>")]) == "\n"
    literal = SPM.encode("<0xF0>")
    assert ids[-4] not in literal and SPM.decode(literal) == "<0xF0>"


def test_decode_does_not_tidy_spaces():
    tokenizer = Tokenizer.from_files(vocabularies.byte_level_files(clean_up_tokenization_spaces=True))
    text = "x != y , he said . 'a' n't do n't"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("tokenizer", [BYTE_BOS, SPM], ids=["byte", "spm"])
def test_exactly_one_bos(tokenizer):
    bos = tokenizer.bos_id
    assert tokenizer.encode("hi")[0] == bos and tokenizer.encode("hi").count(bos) == 1
    assert tokenizer.encode("<s>hi") == tokenizer.encode("hi")
    assert tokenizer.encode("<s>hi", bos=False) == tokenizer.encode("hi")
    assert tokenizer.encode("hi", bos=False) == tokenizer.encode("hi")[1:]
    assert tokenizer.encode("") == [bos]
    literal = tokenizer.encode("<s>hi", special=False)
    assert literal.count(bos) == 1 and tokenizer.decode(literal) == "<s>hi"


def test_no_bos_where_the_files_ask_for_none():
    assert BYTE.bos_id == 0 and BYTE.encode("") == [] and BYTE.encode("hi")[0] != 0
    spm = Tokenizer.from_files(vocabularies.sentencepiece_files(add_bos_token=False, add_eos_token=True))
    assert spm.encode("hi") == [*spm.encode("hi", bos=False), spm.eos_ids[0]]


def test_control_tokens_are_cut_out_of_the_text():
    assert BYTE.encode("a<|im_end|>b") == [*BYTE.encode("a"), 3, *BYTE.encode("b")]
    end = SPM._vocab.token_id("<|im_end|>")
    legacy = SPM.encode("hi<|im_end|>hi", bos=False)
    assert legacy == [*SPM.encode("hi", bos=False), end, *SPM.encode("hi", bos=False)]
    new = Tokenizer.from_files(vocabularies.sentencepiece_files(legacy=False))
    assert new.encode("hi<|im_end|>hi", bos=False) == [
        *SPM.encode("hi", bos=False), end, *SPM_BARE.encode("hi", bos=False)
    ]  # fmt: skip


def test_added_tokens_of_a_sentencepiece_model():
    extra = {"9000": {"content": "<|user|>", "special": True, "rstrip": True}}
    tokenizer = Tokenizer.from_files(vocabularies.sentencepiece_files(added_tokens_decoder=extra, legacy=False))
    assert tokenizer.encode("<|user|> \n hi", bos=False) == [9000, *SPM_BARE.encode("hi", bos=False)]
    assert tokenizer.vocab_size == 9001 and tokenizer.has_token(9000) and not tokenizer.has_token(8999)
    assert tokenizer.decode([9000]) == "" and tokenizer.decode([9000], keep_special=True) == "<|user|>"


def test_mask_tells_which_ids_have_a_token():
    mask = BYTE.token_mask(BYTE.vocab_size + 40)
    assert mask.dtype == np.bool_ and mask.sum() == BYTE.vocab_size == 402 and not mask[BYTE.vocab_size :].any()
    assert BYTE.token_mask(5).shape == (5,)
    assert BYTE.decode([BYTE.vocab_size + 5, -1]) == "" and BYTE.token_text(9999) == ""


def test_eos_ids_are_the_union_of_what_all_files_name():
    files = vocabularies.byte_level_files(eos_token={"content": "</s>"})
    files["generation_config.json"] = b'{"eos_token_id": [3, 1], "temperature": 0.6}'
    files["config.json"] = b'{"eos_token_id": 2, "hidden_size": 8}'
    tokenizer = Tokenizer.from_files(files)
    assert tokenizer.eos_ids == (1, 3, 2)
    again = Tokenizer.from_files(tokenizer.files)  # a checkpoint keeps these files, without config.json
    assert "config.json" not in tokenizer.files and again.eos_ids == (1, 3, 2)
    assert json.loads(again.files["generation_config.json"])["temperature"] == 0.6
    files["config.json"] = b'{"eos_token_id": 99999}'
    assert Tokenizer.from_files(files).eos_ids == (1, 3)


def test_files_survive_and_a_folder_reads_the_same(tmp_path):
    files = vocabularies.byte_level_files(bos=True)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.files == files and tokenizer.encode("hi <s>") == BYTE_BOS.encode("hi <s>")


def test_tokenizer_json_wins_over_tokenizer_model():
    both = Tokenizer.from_files(vocabularies.sentencepiece_files() | vocabularies.byte_level_files())
    assert both.encode("hello") == BYTE.encode("hello")


def test_training_settings_in_the_file_are_not_applied():
    document = json.loads(vocabularies.byte_level_json())
    document["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1, "pad_type_id": 0,
        "pad_token": "</s>",
    }  # fmt: skip
    document["model"]["dropout"] = 0.9
    tokenizer = Tokenizer.from_files({"tokenizer.json": json.dumps(document).encode()})
    assert tokenizer.encode("hello world there") == BYTE.encode("hello world there")


def test_what_other_post_processors_put_around_a_text():
    document = json.loads(vocabularies.byte_level_json())
    roberta = {"type": "RobertaProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0], "trim_offsets": True}
    document["post_processor"] = {"type": "Sequence", "processors": [roberta | {"add_prefix_space": False}]}
    tokenizer = Tokenizer.from_files({"tokenizer.json": json.dumps(document).encode()})
    assert tokenizer.encode("hi") == [0, *BYTE.encode("hi"), 1] and tokenizer.encode("") == [0, 1]


def test_a_vocabulary_of_words():
    import tokenizers

    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<x>": 2}))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<x>"])
    tokenizer = Tokenizer.from_files({"tokenizer.json": core.to_str().encode()})
    assert tokenizer.encode("a b <x> a") == [0, 1, 2, 0] and tokenizer.decode([0, 1, 0]) == core.decode([0, 1, 0])
    with pytest.raises(TokenizerError, match="cannot encode"):
        tokenizer.encode("c")
    core.model = tokenizers.models.WordLevel({"a": 0, "b": 1, "<x>": 2, "?": 3}, unk_token="?")
    tokenizer = Tokenizer.from_files({"tokenizer.json": core.to_str().encode()})
    assert tokenizer.encode("a <x>") == [0, 2] and tokenizer.encode("a <x>", special=False) == [0, 3]


def test_turn_marks_that_sentencepiece_finds_itself():
    tokenizer = Tokenizer.from_files(vocabularies.sentencepiece_files(chat_template="<turn>{{ messages[0].content }}"))
    turn = tokenizer._vocab.token_id("<turn>")
    assert tokenizer.encode("hi<turn>") == [*tokenizer.encode("hi"), turn]
    plain = tokenizer.encode("hi<turn>", special=False)
    assert turn not in plain and tokenizer.decode(plain) == "hi<turn>"
    assert tokenizer.encode_chat([{"role": "user", "content": "a<turn>"}]).count(turn) == 1


def test_lone_surrogates_do_not_crash():
    for tokenizer in ALL:
        assert tokenizer.decode(tokenizer.encode("a\ud800b", bos=False)).startswith("a")


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "tokenizer.json"),
        ({"tokenizer.json": b"{"}, "tokenizer.json"),
        ({"tokenizer.json": b"\xff\xfe"}, "tokenizer.json"),
        ({"tokenizer.model": b"not a model"}, "tokenizer.model"),
        (vocabularies.byte_level_files() | {"tokenizer_config.json": b"[1]"}, "tokenizer_config.json"),
        (vocabularies.byte_level_files() | {"generation_config.json": b"nul"}, "generation_config.json"),
        (vocabularies.sentencepiece_files(added_tokens_decoder={"x": 1}), "added_tokens_decoder"),
        (vocabularies.sentencepiece_files(added_tokens_decoder=[1]), "added_tokens_decoder"),
    ],
)
def test_damaged_files_are_refused_by_name(files, named):
    with pytest.raises(TokenizerError, match=named):
        Tokenizer.from_files(files)


def test_unknown_decoder_and_empty_folder_are_refused(tmp_path):
    document = json.loads(vocabularies.byte_level_json())
    document["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(TokenizerError, match="WordPiece"):
        Tokenizer.from_files({"tokenizer.json": json.dumps(document).encode()})
    with pytest.raises(TokenizerError, match="no vocabulary"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("add_bos_token", "false"), ("add_eos_token", 1), ("legacy", "no"), ("eos_token", 2), ("bos_token", {"id": 1}),
        ("chat_template", 5), ("chat_template", [{"name": "default"}]), ("eos_token", "\ud800"),
        ("added_tokens_decoder", {"430": {"content": "<x>", "special": "no"}}),
    ],
)  # fmt: skip
def test_settings_of_a_wrong_type_are_refused(field, value):
    with pytest.raises(TokenizerError, match=f"{field}|JSON"):
        Tokenizer.from_files(vocabularies.sentencepiece_files(**{field: value}))


@pytest.mark.parametrize("value", ["2", [1, "2"], True, 1.5])
def test_end_ids_of_a_wrong_type_are_refused(value):
    ids = json.dumps({"eos_token_id": value}).encode()
    files = vocabularies.sentencepiece_files() | {"generation_config.json": ids}
    with pytest.raises(TokenizerError, match="eos_token_id"):
        Tokenizer.from_files(files)


def test_a_setting_given_twice_must_be_the_same():
    files = vocabularies.sentencepiece_files()
    for text, refused in (('{"legacy": true, "legacy": true}', False), ('{"legacy": true, "legacy": false}', True)):
        files["tokenizer_config.json"] = text.encode()
        if refused:
            with pytest.raises(TokenizerError, match="'legacy' is there twice"):
                Tokenizer.from_files(files)
        else:
            Tokenizer.from_files(files)


def test_a_piece_that_is_no_text_is_refused():
    files = vocabularies.sentencepiece_files()
    damaged = files["tokenizer.model"].replace(b"<|im_end|>", b"<|im\xb9end|>")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model"):
        Tokenizer.from_files(files | {"tokenizer.model": damaged})
