"""Chat templates: where they come from, what they may use, and what a message cannot do to a chat."""

import json

import pytest
import vocabularies
from hypothesis import given
from hypothesis import strategies as st

from jaxlm.chat import render_chat
from jaxlm.errors import JaxlmError, TokenizerError
from jaxlm.tokenizer import Tokenizer

HI = [{"role": "user", "content": "hi"}]
BYTE = Tokenizer.from_files(vocabularies.byte_level_files())
SPM = Tokenizer.from_files(vocabularies.sentencepiece_files())
KINDS = pytest.mark.parametrize("tokenizer", [BYTE, SPM], ids=["byte", "spm"])

parts = st.one_of(st.text(max_size=5), st.sampled_from([*vocabularies.CONTROL, "\n", "system", "<|im_", "end|>", "|>"]))
contents = st.lists(parts, max_size=6).map("".join)


@KINDS
@given(st.lists(contents, min_size=1, max_size=3))
def test_messages_cannot_make_control_tokens(tokenizer, says):
    messages = [{"role": "user", "content": text} for text in says]
    ids = tokenizer.encode_chat(messages)
    harmless = tokenizer.encode_chat([{"role": "user", "content": "x"}] * len(says))
    control = tokenizer.special_ids
    assert [i for i in ids if i in control] == [i for i in harmless if i in control]
    if tokenizer is BYTE and not any("\ufdd0" in text for text in says):
        assert tokenizer.decode(ids, keep_special=True) == tokenizer.render_chat(messages)


@KINDS
@given(st.lists(st.text(st.sampled_from("abc <|>_\n你🙂"), max_size=9), min_size=1, max_size=3))
def test_ordinary_messages_give_the_ids_of_the_rendered_text(tokenizer, says):
    messages = [{"role": "user", "content": text} for text in says]
    assert tokenizer.encode_chat(messages) == tokenizer.encode(tokenizer.render_chat(messages), bos=False)


def test_turn_marks_that_are_not_flagged_special_are_guarded_too():
    document = json.loads(vocabularies.byte_level_json())
    for token in document["added_tokens"]:
        token["special"], token["normalized"] = False, True
    template = vocabularies.CHATML + "{% if '</think>' in messages[-1].content %}T{% endif %}"
    config = json.dumps({"chat_template": template}).encode()
    tokenizer = Tokenizer.from_files({"tokenizer.json": json.dumps(document).encode(), "tokenizer_config.json": config})
    ids = tokenizer.encode_chat([{"role": "user", "content": "a<|im_end|>b"}])
    assert ids.count(3) == 1 and "a<|im_end|>b" in tokenizer.decode(ids)
    # What the template looks for in a message must still be found there; so must the model's own marks.
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "</think>"}])).endswith("T")
    assert 3 in tokenizer.encode("<|im_end|>") and 3 not in tokenizer.encode("<|im_end|>", special=False)
    assert tokenizer.encode_chat([{"role": "assistant", "content": "a<|im_end|>b"}]).count(3) == 2


def test_tool_texts_cannot_make_control_tokens():
    tokenizer = Tokenizer.from_files(vocabularies.byte_level_files(chat_template="<s>{{ tools | tojson }}"))
    assert [i for i in tokenizer.encode_chat(HI, tools=[{"name": "x</s>"}]) if i in tokenizer.special_ids] == [0]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}", "hi\n"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hi"}'),
        ("{{ {'a': '<b>é'} | tojson(indent=1) }}", '{\n "a": "<b>é"\n}'),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}", "1"),
        ("{{ bos_token }}|{{ eos_token }}|{{ unk_token }}", "<s>|</s>|"),
        ("{{ add_generation_prompt }}{{ tools is none }}{{ flavour }}", "TrueTruesweet"),
        ("{{ strftime_now('%Y') | length }}{{ 'name' in messages[0] }}", "4False"),
    ],
)
def test_what_template_authors_expect(template, expected):
    messages = [{"role": "user", "content": "hi", "name": None}]
    tokens = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    assert render_chat(template, messages, **tokens, flavour="sweet") == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('System role\nnot supported') }}", "System role not supported"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for %}", "not valid"),
        ("{{ messages[0].content.foo.bar }}", "undefined|no attribute"),
        ("{{ 1 / 0 }}", "division"),
        ("{% include 'x' %}", "loader"),
    ],
)
def test_template_errors_are_one_line(template, message):
    with pytest.raises(TokenizerError, match=message) as caught:
        render_chat(template, HI)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, ["hi"], [1]])
def test_messages_of_a_wrong_shape_are_refused(messages):
    for run in (lambda: render_chat("x", messages), lambda: BYTE.encode_chat(messages)):
        with pytest.raises(JaxlmError, match="list of dicts"):
            run()


def test_where_a_template_is_found():
    files = vocabularies.byte_level_files(chat_template="config")
    assert Tokenizer.from_files(files).render_chat(HI) == "config"
    files["chat_template.json"] = b'{"chat_template": "processor"}'
    assert Tokenizer.from_files(files).render_chat(HI) == "config"
    files["chat_template.jinja"] = b"file"
    assert Tokenizer.from_files(files).render_chat(HI) == "file"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer.from_files(vocabularies.byte_level_files(chat_template=named))
    assert tokenizer.chat_template == "plain" and tokenizer.render_chat(HI) == "plain"
    assert tokenizer.render_chat(HI, tools=[{"name": "f"}]) == "tools"


def test_extra_template_files_of_a_folder(tmp_path):
    for name, data in vocabularies.byte_level_files().items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.render_chat(HI, tools=[{"name": "f"}]) == "tools"
    assert Tokenizer.from_files(tokenizer.files).templates == tokenizer.templates


def test_no_template_is_an_error_and_none_is_made_up():
    tokenizer = Tokenizer.from_files(vocabularies.byte_level_files(chat_template=None))
    assert tokenizer.chat_template is None
    with pytest.raises(TokenizerError, match="no chat template"):
        tokenizer.encode_chat(HI)


def test_generation_prompt_is_honoured():
    assert BYTE.render_chat(HI).endswith("<|im_start|>assistant\n")
    assert BYTE.render_chat(HI, add_generation_prompt=False).endswith("<|im_end|>\n")
