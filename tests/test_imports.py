"""Imports go one way, the core stays light, and the wheel holds every package."""

import ast
import pathlib
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
CORE = sorted((ROOT / "jaxlm").glob("*.py"))
OTHERS = sorted(p for folder in ("conversion", "checkpoints") for p in (ROOT / folder).rglob("*.py"))
# Lowest first; a module imports from lower rows alone, or sideways, without a circle.
ORDER = [
    {"errors"},
    {"spec"},
    {"config"},
    {"params", "sharding"},
    {"quant", "cpu", "linear", "norm", "rope", "cache", "visible", "accelerator", "gpu", "tpu", "narrow"},
    {"attention", "ffn", "moe"},
    {"layers", "layer_inputs"},
    {"model", "sample"},
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def imports(path: pathlib.Path) -> set[str]:
    """Dotted names of all modules that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def outside(path: pathlib.Path) -> set[str]:
    """Top-level packages that are neither ours nor Python's."""
    return {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"jaxlm"}


def siblings(path: pathlib.Path) -> set[str]:
    names = {p.stem for p in CORE}
    return {parts[1] for name in imports(path) if (parts := name.split("."))[0] == "jaxlm" and parts[1:]} & names


core = [path for path in CORE if path.stem in LEVEL]


@pytest.mark.parametrize("path", core, ids=lambda p: p.stem)
def test_the_core_imports_jax_numpy_and_flax_struct_alone(path):
    assert outside(path) <= {"jax", "numpy", "flax"}
    assert {name for name in imports(path) if name.startswith("flax")} <= {"flax", "flax.struct"}


@pytest.mark.parametrize("path", core, ids=lambda p: p.stem)
def test_the_core_imports_downwards(path):
    level = LEVEL[path.stem]
    for name in siblings(path):
        assert name in LEVEL and LEVEL[name] <= level, f"{path.stem} imports {name}"


def test_no_two_modules_import_each_other():
    graph = {path.stem: siblings(path) for path in CORE if path.stem != "__init__"}
    while graph:
        free = [name for name, needs in graph.items() if not needs & graph.keys()]
        assert free, f"a circle among {sorted(graph)}"
        for name in free:
            del graph[name]


@pytest.mark.parametrize("path", CORE, ids=lambda p: p.stem)
def test_the_runtime_does_without_torch(path):
    assert not outside(path) & {"torch", "transformers", "safetensors", "gguf", "tensorflow"}


@pytest.mark.parametrize("path", CORE + OTHERS, ids=lambda p: f"{p.parent.name}.{p.stem}")
def test_folders_are_imported_under_jaxlm(path):
    """`import conversion` from a checkout would be a second copy of the module."""
    assert not {name.split(".")[0] for name in imports(path)} & {"conversion", "checkpoints", "tests"}


def test_checkpoints_do_not_need_conversion():
    for path in OTHERS:
        if path.is_relative_to(ROOT / "checkpoints"):
            assert not any(name.startswith("jaxlm.conversion") for name in imports(path)), path


def test_the_wheel_holds_every_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"jaxlm": "jaxlm"} | settings["package-dir"]
    tree = set()
    for package in ("jaxlm", "jaxlm.checkpoints", "jaxlm.conversion"):
        top = ROOT / folders[package]
        for path in top.rglob("*.py"):
            tree.add(".".join([package, *path.parent.relative_to(top).parts]))
    assert sorted(settings["packages"]) == sorted(tree)
