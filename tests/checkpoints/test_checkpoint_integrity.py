"""Damaged, edited, incomplete and foreign folders are refused by the name of the file."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from jaxlm import checkpoints
from jaxlm.checkpoints import manifest
from jaxlm.errors import CheckpointError

KEPT = {"tokenizer.json": b'{"a": 1}', "chat_template.jinja": "{{ 你好 }}".encode(), "generation_config.json": b"{}"}
CHUNK = "params/segments.0.0.attn.q/c.1.0.0.0"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("made") / "c"
    options = {"tokenizer_files": KEPT, "source_config": {"model_type": "x"}, "eos_ids": [2, np.int64(5)]}
    params = tiny.random_params(tiny.FULL)
    checkpoints.save_params(path, tiny.FULL, params, source="a test", extra={"k": [1], 10: 1, 9: 2}, **options)
    return path


@pytest.fixture
def copy(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "c"))


def load(path: Path):
    return checkpoints.restore_params(checkpoints.read_checkpoint(path))


def flip(path: Path, at: int = 5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_everything_beside_the_arrays_comes_back(made):
    opened = checkpoints.read_checkpoint(str(made))
    assert {name: opened.read_file(name) for name in opened.tokenizer_files} == KEPT
    assert {name: (made / name).read_bytes() for name in KEPT} == KEPT
    assert opened.source_config == {"model_type": "x"}
    assert (opened.eos_ids, opened.source) == ((2, 5), "a test")
    assert opened.extra == {"k": [1], "9": 2, "10": 1}
    assert checkpoints.verify_checkpoint(made) == opened
    with pytest.raises(CheckpointError, match="holds no file 'x'"):
        opened.read_file("x")


def test_every_file_is_listed_with_its_hash(made):
    opened = checkpoints.read_checkpoint(made)
    files = {p.relative_to(made).as_posix() for p in made.rglob("*") if p.is_file()}
    assert files == {*opened.files, manifest.MANIFEST}


def test_a_flipped_byte_in_any_file_is_found_on_load(made, copy):
    """Every file in turn, at its first, middle and last byte."""
    for name in sorted(p.relative_to(made).as_posix() for p in made.rglob("*") if p.is_file()):
        for at in (0, (made / name).stat().st_size // 2, -1):
            flip(copy / name, at)
            with pytest.raises(CheckpointError, match=re.escape(Path(name).name)):
                load(copy)
            flip(copy / name, at)
    load(copy)


def test_verify_names_a_chunk_that_was_replaced_by_another_valid_one(copy):
    """Two layers exchanged have valid checksums of their own; only the hashes tell."""
    other = CHUNK.replace("c.1", "c.0")
    (copy / CHUNK).write_bytes((copy / other).read_bytes())
    load(copy)
    with pytest.raises(CheckpointError, match=CHUNK):
        checkpoints.verify_checkpoint(copy)
    with pytest.raises(CheckpointError, match=CHUNK):
        checkpoints.restore_params(checkpoints.read_checkpoint(copy), verify=True)


@pytest.mark.parametrize("name", [CHUNK, "tokenizer.json", "model_config.json", "params/_METADATA"])
def test_truncated_and_missing_files_are_named(copy, name):
    data = (copy / name).read_bytes()
    for cut in (data[:-1], data + b"x", b""):
        (copy / name).write_bytes(cut)
        with pytest.raises(CheckpointError, match=f"{name}: has {len(cut)} bytes; expected {len(data)}"):
            checkpoints.read_checkpoint(copy)
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: is missing"):
        checkpoints.read_checkpoint(copy)


def test_a_chunk_that_goes_missing_after_opening_is_not_zeros(copy):
    opened = checkpoints.read_checkpoint(copy)
    (copy / CHUNK).unlink()
    with pytest.raises(CheckpointError, match=r"q/c\.1\.0\.0\.0"):
        checkpoints.restore_params(opened)


def test_zeros_are_stored_like_anything_else(tmp_path):
    params = jax.tree.map(np.zeros_like, tiny.random_params(tiny.FULL))
    checkpoints.save_params(tmp_path / "c", tiny.FULL, params)
    assert tiny.equal_trees(load(tmp_path / "c"), params)


def test_extra_files_among_the_arrays_are_refused_and_elsewhere_ignored(copy):
    (copy / "README.md").write_text("mine")
    load(copy)
    (copy / "params/segments.0.0.attn.q/c.2.0.0.0").write_bytes((copy / CHUNK).read_bytes())
    with pytest.raises(CheckpointError, match=r"q/c.2.0.0.0: does not belong"):
        checkpoints.read_checkpoint(copy)


def reseal(path: Path, **changes) -> None:
    """A manifest with other content and a valid hash of its own, as an edited or crafted one may have."""
    data = json.loads((path / manifest.MANIFEST).read_text())
    data.pop("sha256")
    (path / manifest.MANIFEST).write_bytes(manifest.seal(data | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version is 2"),
        ({"version": None}, "version is None"),
        ({"format": "x"}, "format is 'x'"),
        ({"files": []}, "files is"),
        ({"files": {"../x": {"size": 1, "sha256": ""}}}, "'../x' leaves the folder"),
        ({"files": {"/etc/passwd": {"size": 1, "sha256": ""}}}, "leaves the folder"),
        ({"files": {"a": 3}}, "'a'. has no size"),
        ({"leaves": {}}, "array 'embed.table' is missing"),
        ({"eos_ids": "2"}, "eos_ids is"),
        ({"eos_ids": ["2"]}, "eos_ids"),
        ({"tokenizer_files": ["x"]}, "'x' is not among"),
        ({"tokenizer_files": [["x"]]}, "tokenizer_files"),
    ],
)  # fmt: skip
def test_a_manifest_with_other_content_is_refused(copy, changes, message):
    reseal(copy, **changes)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.read_checkpoint(copy)


@pytest.mark.parametrize("chunk", [[1, 4, 6, 8, 1], [0, 4, 6, 8], [1, 4, 6, -8], [1, 4, 6, "8"], [2, 4, 6, 8], None])
def test_a_manifest_with_other_chunks_is_refused(copy, chunk):
    leaves = json.loads((copy / manifest.MANIFEST).read_text())["leaves"]
    leaves["segments.0.0.attn.q"]["chunk"] = chunk
    reseal(copy, leaves=leaves)
    with pytest.raises(CheckpointError, match=r"attn\.q'|lists 21 array chunks"):
        checkpoints.read_checkpoint(copy)


def test_a_huge_config_is_refused_without_memory(copy):
    config = json.loads((copy / manifest.CONFIG).read_text()) | {"vocab_size": 10**15}
    files = json.loads((copy / manifest.MANIFEST).read_text())["files"]
    (copy / manifest.CONFIG).write_text(json.dumps(config))
    found = manifest.hash_file(copy / manifest.CONFIG)
    reseal(copy, files=files | {manifest.CONFIG: {"size": found.size, "sha256": found.sha256}})
    with pytest.raises(CheckpointError, match=r"embed.table"):
        checkpoints.read_checkpoint(copy)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a":' * 100_000, "\xff", "null"])
def test_a_manifest_that_is_no_json_object(copy, text):
    (copy / manifest.MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"jaxlm\.json"):
        checkpoints.read_checkpoint(copy)


def test_folders_that_are_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="x: does not exist"):
        checkpoints.read_checkpoint(tmp_path / "x")
    with pytest.raises(CheckpointError, match="is not a jaxlm checkpoint"):
        checkpoints.read_checkpoint(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is not a jaxlm checkpoint"):
        checkpoints.read_checkpoint(tmp_path / "file")


def test_a_moved_folder_loads(made, copy, tmp_path, monkeypatch):
    os.rename(copy, tmp_path / "moved 你好")
    monkeypatch.chdir(tmp_path / "moved 你好")
    assert tiny.equal_trees(load(Path(".")), load(made))


def test_nothing_heavy_is_imported_and_nothing_is_left_behind(made, tmp_path):
    """Importing needs no Orbax; a whole round trip prints nothing and leaves no thread."""
    code = """
import sys, threading
import jaxlm, jaxlm.checkpoints as c
assert not {m for m in sys.modules if m.split(".")[0] in ("orbax", "tensorstore", "huggingface_hub")}
opened = c.read_checkpoint(sys.argv[1])
assert "orbax" not in sys.modules
params = c.restore_params(opened)
c.save_params(sys.argv[2], opened.config, params)
assert threading.enumerate() == [threading.main_thread()]
"""
    warn = ["-W", "always::ResourceWarning", "-W", "always::RuntimeWarning"]
    command = [sys.executable, *warn, "-c", code, str(made), str(tmp_path / "d")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.stdout, result.stderr, result.returncode) == ("", "", 0)


def test_no_warning_is_raised(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.save_params(tmp_path / "c", tiny.BIASES, tiny.random_params(tiny.BIASES))
        load(tmp_path / "c")
