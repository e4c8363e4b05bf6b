"""One model in three kinds of file: the same numbers, vocabulary and answers from each; what is refused."""

import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
import vocabularies
from foreign import llama_config, llama_folder, llama_shapes, random_weights, save_gguf

import jaxlm
from jaxlm import JaxlmError, generate

GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
TOKENS = vocabularies.byte_level_metadata()["tokenizer.ggml.tokens"]
PROMPTS = ["hello world", "你好 🙂", "def add(a, b):\n"]


def gguf_file(path: Path) -> Path:
    """The weights of `llama_folder` and the same vocabulary."""
    config = llama_config(vocab_size=len(TOKENS))
    tensors = {}
    for name, array in random_weights(llama_shapes(config), 0).items():
        short = name.removesuffix(".weight").removeprefix("model.layers.")
        layer, _, rest = short.partition(".")
        place = f"blk.{layer}.{GGUF_NAMES[rest]}" if layer.isdigit() else GGUF_NAMES[short]
        if place.endswith(("attn_q", "attn_k")):  # Rotated pairs are neighbours there, half a head apart here.
            heads = array.reshape(-1, 2, config["head_dim"] // 2, array.shape[1])
            array = heads.transpose(0, 2, 1, 3).reshape(array.shape)
        tensors[f"{place}.weight"] = array
    settings = {
        "context_length": 128, "embedding_length": 48, "block_count": 2, "feed_forward_length": 56,
        "attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 10,
        "attention.value_length": 10, "rope.dimension_count": 10, "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": len(TOKENS),
    }  # fmt: skip
    return save_gguf(path, "llama", settings | vocabularies.byte_level_metadata(), tensors)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """The same model as a folder, as a GGUF file, and as jaxlm checkpoints of both, whose originals are gone."""
    base = tmp_path_factory.mktemp("kinds")

    def folder(path: Path) -> Path:
        llama_folder(path, vocab_size=len(TOKENS), shards=2)
        for name, data in vocabularies.byte_level_files().items():
            (path / name).write_bytes(data)
        return path

    for name, original in (("from folder", folder(base / "gone")), ("from gguf", gguf_file(base / "gone.gguf"))):
        assert jaxlm.convert(original, base / name) == base / name
    shutil.rmtree(base / "gone")
    (base / "gone.gguf").unlink()
    converted = {name: base / name for name in ("from folder", "from gguf")}
    return {"folder": folder(base / "folder"), "gguf": gguf_file(base / "model.gguf")} | converted


@pytest.fixture(scope="module")
def models(sources) -> dict[str, jaxlm.Model]:
    return {kind: jaxlm.load(path) for kind, path in sources.items()}


def test_every_kind_is_the_same_model(models):
    ids = tiny.random_tokens((2, 20), 3, len(TOKENS))
    expected = tiny.forward(models["folder"].params, ids, models["folder"].config)
    assert np.abs(expected).max() > 1
    answers = generate(models["folder"], PROMPTS, max_new_tokens=12, temperature=1.0)
    assert len({answer.text for answer in answers}) == 3
    for kind, model in models.items():
        np.testing.assert_array_equal(tiny.forward(model.params, ids, model.config), expected, err_msg=kind)
        assert generate(model, PROMPTS, max_new_tokens=12, temperature=1.0) == answers
        assert model.tokenizer.chat_template == vocabularies.CHATML
        assert (model.tokenizer.bos_id, model.eos_ids[0]) == (0, 1)
    for original, kept in (("folder", "from folder"), ("gguf", "from gguf")):
        assert models[kept].eos_ids == models[original].eos_ids


def test_the_name_of_a_model_is_what_was_asked_for(sources):
    assert jaxlm.load(str(sources["gguf"])).name == str(sources["gguf"])


def dtypes(model: jaxlm.Model) -> set[str]:
    return {leaf.dtype.name for leaf in jax.tree.leaves(model.params)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["folder", "gguf", "from folder"])
def test_a_dtype_is_what_was_asked_for_and_stays(sources, kind, dtype, tmp_path):
    model = jaxlm.load(sources[kind], dtype=dtype)
    assert dtypes(model) == {dtype} == {model.config.dtype}
    if kind == "folder":
        again = jaxlm.load(jaxlm.convert(sources[kind], tmp_path / "out", dtype=dtype))
        assert tiny.equal_trees(again.params, model.params) and again.config == model.config


def test_the_dtype_of_the_file_is_kept(tmp_path):
    folder = llama_folder(tmp_path / "half", dtype="bfloat16", torch_dtype="bfloat16")
    model = jaxlm.load(folder)
    assert dtypes(model) == {"bfloat16"} == {model.config.dtype}
    assert model.tokenizer is None and model.eos_ids == ()
    kept = jaxlm.load(jaxlm.convert(folder, tmp_path / "kept"))
    assert tiny.equal_trees(kept.params, model.params)


@pytest.mark.parametrize("dtype", ["float64", "f32", "bf16", "int8", "", "FLOAT32", 32])
def test_bad_dtypes(sources, tmp_path, dtype):
    for call in (lambda: jaxlm.load(sources["folder"], dtype=dtype),
                 lambda: jaxlm.convert(sources["folder"], tmp_path / "out", dtype=dtype)):  # fmt: skip
        with pytest.raises(JaxlmError, match=r"dtype is .*; allowed: float32, bfloat16, float16"):
            call()
    assert not (tmp_path / "out").exists()


def test_bad_sources(tmp_path, sources):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "empty.gguf").write_bytes(b"")
    for name in ("empty", "file.txt", "empty.gguf", "missing.gguf", "missing"):
        with pytest.raises(JaxlmError, match=name):
            jaxlm.load(tmp_path / name)
        with pytest.raises(JaxlmError, match=name):
            jaxlm.convert(tmp_path / name, tmp_path / "out")
    for source in (None, 5, b"x", ["a"], ""):
        with pytest.raises(JaxlmError):
            jaxlm.load(source)
    with pytest.raises(JaxlmError, match="quantize is 'int3'"):
        jaxlm.load(sources["folder"], quantize="int3")
    with pytest.raises(JaxlmError, match="already"):
        jaxlm.convert(sources["from gguf"], tmp_path / "out")


def test_convert_does_not_overwrite_unless_told(sources, tmp_path):
    dest = tmp_path / "out"
    dest.mkdir()
    (dest / "mine.txt").write_text("mine")
    with pytest.raises(JaxlmError, match="out"):
        jaxlm.convert(sources["gguf"], dest)
    assert os.listdir(dest) == ["mine.txt"]
    jaxlm.convert(sources["gguf"], dest, force=True)
    before = {path: path.stat().st_mtime_ns for path in dest.rglob("*")}
    with pytest.raises(JaxlmError, match="force"):
        jaxlm.convert(sources["folder"], dest)
    assert {path: path.stat().st_mtime_ns for path in dest.rglob("*")} == before
    with pytest.raises(JaxlmError):
        jaxlm.convert(sources["folder"], sources["folder"], force=True)
    assert dtypes(jaxlm.load(sources["folder"])) == {"float32"}


def test_progress_goes_from_nothing_to_all(sources, tmp_path):
    seen: list[tuple[int, int]] = []
    calls = {kind: lambda kind=kind: jaxlm.load(sources[kind], progress=note) for kind in sources}
    lines: list[str] = []
    calls["convert"] = lambda: jaxlm.convert(sources["gguf"], tmp_path / "out", progress=note, report=lines.append)

    def note(done, total, *_):
        seen.append((done, total))

    for name, call in calls.items():
        seen.clear()
        call()
        done = [d for d, _ in seen]
        assert done == sorted(done) and seen[-1][0] == seen[-1][1] > 10_000, name
        assert len({total for _, total in seen}) == 1
    assert len(lines) == 1 and "of disk" in lines[0]
