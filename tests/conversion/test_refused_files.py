"""What is wrong with the files of a Hugging Face folder is said by name, before anything is computed."""

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from foreign import llama_config, llama_folder, llama_shapes, random_weights, save_folder, write_safetensors
from hypothesis import given
from hypothesis import strategies as st

from jaxlm.conversion import load_source, open_source
from jaxlm.errors import CheckpointError, ConfigError, JaxlmError


def tensors(folder: Path) -> Path:
    return folder / "model.safetensors"


def index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model.safetensors.index.json").read_text())


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    contents = index(folder)
    change(contents["weight_map"])
    (folder / "model.safetensors.index.json").write_text(json.dumps(contents))


def edit_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = tensors(folder).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    write_safetensors(tensors(folder), json.dumps(header).encode(), data[8 + length :])


def cut(folder: Path) -> None:
    os.truncate(tensors(folder), tensors(folder).stat().st_size - 4)


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], Any], **config: Any) -> None:
    weights = random_weights(llama_shapes(llama_config()), 0)
    change(weights)
    save_folder(folder, llama_config(**config), weights)


def move_first(header: dict[str, Any]) -> None:
    names = [n for n in header if n != "__metadata__"]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
    header[names[1]]["shape"] = header[names[0]]["shape"]


Q = "model.layers.1.self_attn.q_proj.weight"
FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda f: rewrite(f, lambda w: w.pop(Q)), f"tensor '{Q}' is missing"),
    "extra layer": (
        lambda f: rewrite(f, lambda w: w.update({"model.layers.2.mlp.up_proj.weight": w[Q]})),
        "'model.layers.2.mlp.up_proj.weight' is in the file but",
    ),
    "bias without a slot": (
        lambda f: rewrite(f, lambda w: w.update({Q.replace("weight", "bias"): w[Q][:, 0]})),
        "q_proj.bias' is in the file but",
    ),
    "scales of a quantised file": (
        lambda f: rewrite(f, lambda w: w.update({Q + "_scale_inv": w[Q]})),
        "weight_scale_inv' is in the file but",
    ),
    "misshapen": (
        lambda f: rewrite(f, lambda w: w.update({Q: w[Q].T})),
        rf"'{Q}' has shape \[48, 80\]; the config needs \[80, 48\]",
    ),
    "wrong type": (
        lambda f: rewrite(f, lambda w: w.update({Q: w[Q].astype(np.int32)})),
        f"'{Q}' has type I32; allowed: F32",
    ),
    "tied with another head": (
        lambda f: rewrite(f, lambda w: None, tie_word_embeddings=True),
        "'lm_head.weight' differs from 'model.embed_tokens.weight'",
    ),
    "tied with a head of another shape": (
        lambda f: rewrite(f, lambda w: w.update({"lm_head.weight": w[Q]}), tie_word_embeddings=True),
        "'lm_head.weight' has shape",
    ),
    "untied without a head": (
        lambda f: rewrite(f, lambda w: w.pop("lm_head.weight")),
        "tensor 'lm_head.weight' is missing",
    ),
    "cut": (cut, "model.safetensors.* cut off"),
    "longer than described": (lambda f: tensors(f).open("ab").write(b"1234"), "its header describes"),
    "empty": (lambda f: tensors(f).write_bytes(b""), "is not a safetensors file, or cut off"),
    "huge header": (lambda f: tensors(f).write_bytes(b"\xff" * 64), "is not a safetensors file, or cut off"),
    "header of no JSON": (lambda f: write_safetensors(tensors(f), b"{'a'", b""), "header: is not valid JSON"),
    "nested header": (lambda f: write_safetensors(tensors(f), b'{"a":' * 9999, b""), "header: is not valid JSON"),
    "header of a list": (lambda f: write_safetensors(tensors(f), b"[]", b""), "holds a JSON list"),
    "twice": (lambda f: write_safetensors(tensors(f), b'{"a":1,"a":2}', b""), "'a' is there twice"),
    "overlapping": (lambda f: edit_header(f, move_first), "overlaps"),
    "unknown dtype": (lambda f: edit_header(f, lambda h: h[Q].update(dtype="F4")), f"'{Q}' has dtype 'F4'"),
    "negative shape": (lambda f: edit_header(f, lambda h: h[Q].update(shape=[-1, 48])), f"'{Q}' has shape"),
    "shape unlike its bytes": (
        lambda f: edit_header(f, lambda h: h[Q].update(shape=[1 << 40, 48])),
        f"'{Q}': shape .* needs",
    ),
    "offsets past the end": (
        lambda f: edit_header(f, lambda h: h[Q].update(data_offsets=[1 << 50, (1 << 50) + 15360])),
        f"'{Q}' ends at",
    ),
    "strange entry": (lambda f: edit_header(f, lambda h: h.update({Q: 7})), f"'{Q}': its header entry is '7'"),
    "only a pickle": (lambda f: tensors(f).rename(f / "pytorch_model.bin"), "pytorch_model.bin.*save_pretrained"),
    "no weights": (lambda f: tensors(f).unlink(), "has no weights"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config of no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: is not valid JSON"),
}


@pytest.mark.parametrize("name", FILES)
def test_file(name: str, tmp_path: Path) -> None:
    damage, message = FILES[name]
    damage(llama_folder(tmp_path))
    with pytest.raises(CheckpointError, match=message):
        load_source(tmp_path)


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def leave(folder: Path, target: Path) -> None:
    """A shard that is a valid file elsewhere."""
    target.mkdir()
    shutil.copy(folder / ONE, target / ONE)


SHARDS: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "missing": (lambda f, t: (f / TWO).unlink(), "-00002.safetensors', but there is no such file"),
    "not in the shard": (
        lambda f, t: edit_index(f, lambda w: w.update({"a.weight": ONE})),
        "tensor 'a.weight' is not in",
    ),
    "not in the index": (lambda f, t: edit_index(f, lambda w: w.pop(Q)), f"tensor '{Q}' is missing"),
    "above": (
        lambda f, t: (leave(f, t), edit_index(f, lambda w: w.update({Q: f"../{t.name}/{ONE}"}))),
        f"'{Q}' is '../elsewhere.*inside the folder",
    ),
    "absolute": (
        lambda f, t: (leave(f, t), edit_index(f, lambda w: w.update({Q: str(t / ONE)}))),
        f"'{Q}' is '/.*inside the folder",
    ),
    "a link outwards": (
        lambda f, t: (leave(f, t), (f / ONE).unlink(), os.symlink(t / ONE, f / ONE)),
        "a link that leaves the folder",
    ),
    "not a name": (lambda f, t: edit_index(f, lambda w: w.update({Q: 3})), f"entry of '{Q}' is 3"),
    "no map": (lambda f, t: (f / "model.safetensors.index.json").write_text("{}"), "weight_map is None"),
    "named twice": (
        lambda f, t: (f / "model.safetensors.index.json").write_text('{"weight_map":{"a":"b","a":"c"}}'),
        "'a' is there twice",
    ),
}


@pytest.mark.parametrize("name", SHARDS)
def test_shards(name: str, tmp_path: Path) -> None:
    damage, message = SHARDS[name]
    folder = llama_folder(tmp_path / "model", shards=2)
    damage(folder, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=message):
        open_source(folder)


def test_stray_files_and_buffers_do_not_count(tmp_path: Path) -> None:
    """Beside an index another model.safetensors is nothing; saved frequencies are known to be superfluous."""
    plain = load_source(llama_folder(tmp_path / "plain"))
    folder = llama_folder(tmp_path / "sharded", shards=3)
    rewrite(tmp_path / "zeros", lambda w: w.update({n: 0 * a for n, a in w.items()}))
    (tmp_path / "zeros" / "model.safetensors").rename(folder / "model.safetensors")
    rewrite(tmp_path / "buffer", lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": w[Q][0]}))
    for other in (folder, tmp_path / "buffer"):
        loaded = load_source(other)
        assert loaded.config == plain.config
        same = jax_equal(loaded.params, plain.params)
        assert same


def jax_equal(a: Any, b: Any) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool(np.array_equal(x, y)), a, b)))


def test_tied_head_that_is_the_same_is_accepted(tmp_path: Path) -> None:
    rewrite(tmp_path, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"]}), tie_word_embeddings=True)
    assert "lm_head" not in load_source(tmp_path).params


def test_hub_downloads_link_to_their_blobs(tmp_path: Path) -> None:
    snapshot = llama_folder(tmp_path / "snapshots" / "abc", shards=2)
    (tmp_path / "blobs").mkdir()
    for i, shard in enumerate(sorted(snapshot.glob("*.safetensors"))):
        shard.rename(tmp_path / "blobs" / str(i))
        os.symlink(f"../../blobs/{i}", shard)
    assert open_source(snapshot).config.vocab_size == 61


def test_values_beyond_float16(tmp_path: Path) -> None:
    rewrite(tmp_path, lambda w: w[Q].fill(1e5))
    with pytest.raises(CheckpointError, match=f"'{Q}' has values beyond 65504"):
        load_source(tmp_path, "float16")
    assert load_source(tmp_path, "bfloat16").config.dtype == "bfloat16"
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        load_source(tmp_path, "int8")


def test_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "weights.txt").write_text("x")
    for name, message in (("nothing", "does not exist"), ("weights.txt", r"does not end in \.gguf")):
        with pytest.raises(CheckpointError, match=message):
            open_source(tmp_path / name)


@given(st.data())
def test_a_mutated_file_is_refused_or_still_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes of config or header changed at random: our own error, or a model; nothing else."""
    folder = llama_folder(tmp_path_factory.mktemp("fuzz"), num_hidden_layers=1)
    path = data.draw(st.sampled_from([folder / "config.json", tensors(folder)]))
    contents = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        contents[data.draw(st.integers(0, min(len(contents), 1200) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(contents)
    with contextlib.suppress(JaxlmError):
        open_source(folder)
