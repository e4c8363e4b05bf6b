"""What an install brings: the wheel in an environment of its own, where jaxlm is used from another folder."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import scripted

ROOT = Path(__file__).parent.parent
FOLDERS = {"jaxlm": "jaxlm", "jaxlm.checkpoints": "checkpoints", "jaxlm.conversion": "conversion"}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules() -> dict[str, Path]:
    """Every module of the tree by the name it is imported under."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def test_every_folder_of_code_is_declared_as_a_package():
    declared = set(project()["tool"]["setuptools"]["packages"])
    packages = {name for name, path in modules().items() if path.name == "__init__.py"}
    folders = {name.rpartition(".")[0] for name, path in modules().items() if path.name != "__init__.py"}
    assert declared == packages >= folders


def test_the_core_needs_no_other_framework_and_no_backend():
    needed = " ".join(project()["project"]["dependencies"]).lower()
    assert not any(name in needed for name in ("torch", "transformers", "jaxlib", "cuda", "tpu"))


def run(*argv: str | Path, cwd: Path, **changes: str) -> str:
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden} | {"XLA_FLAGS": ""} | changes
    done = subprocess.run([str(a) for a in argv], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> tuple[Path, Path]:
    """(the wheel, an environment with it); dependencies come from the environment that runs the tests."""
    base = tmp_path_factory.mktemp("install")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    try:
        import setuptools

        isolation = ["--no-build-isolation"] if int(setuptools.__version__.split(".")[0]) >= 77 else []
    except ImportError:
        isolation = []
    # From a copy, so that nothing built before is packed along and nothing is left behind.
    tree = base / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "jaxlm_main.py", *FOLDERS.values()):
        run("cp", "-r", ROOT / name, tree, cwd=base)
    run(*pip, "wheel", "--quiet", "--no-deps", *isolation, "-w", base, tree, cwd=base)
    wheel = next(base.glob("jaxlm-*.whl"))
    venv.create(base / "venv", with_pip=True)
    python = base / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=base).strip())
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=base)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return wheel, base / "venv"


@pytest.mark.slow
def test_the_wheel_holds_the_whole_tree_and_no_general_names(installed):
    wheel, env = installed
    names = set(zipfile.ZipFile(wheel).namelist())
    places = {name.replace(".", "/"): path.name == "__init__.py" for name, path in modules().items()}
    expected = {f"{place}/__init__.py" if package else f"{place}.py" for place, package in places.items()}
    assert {n for n in names if n.endswith(".py")} == expected | {"jaxlm_main.py"}
    assert "jaxlm/py.typed" in names and any(n.endswith("licenses/LICENSE") for n in names)
    assert {n.split("/")[0].split("-")[0] for n in names} == {"jaxlm", "jaxlm_main.py"}
    site = next(env.glob("lib/python*/site-packages"))
    assert not {"conversion", "checkpoints", "tests", "kernels"} & {path.name for path in site.iterdir()}


@pytest.mark.slow
def test_the_installed_command_works_from_another_folder(installed, tmp_path):
    _, env = installed
    scripted.walk_folder(tmp_path / "model", scripted.text_walk("abc", "x"))
    jaxlm, settings = env / "bin" / "jaxlm", {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert run(jaxlm, "generate", "--model", "model", "--raw", "x", cwd=tmp_path, **settings) == "abc\n"
    run(jaxlm, "convert", "model", "out", cwd=tmp_path, **settings)
    assert run(jaxlm, "generate", "--model", "out", "x", cwd=tmp_path, **settings) == "abc\n"
    where = "import jaxlm, jaxlm.conversion.families, jaxlm.checkpoints as c; print(jaxlm.__file__, c.__file__)"
    for path in run(env / "bin" / "python", "-c", where, cwd=tmp_path).split():
        assert Path(path).is_relative_to(env)
    for name in ("conversion", "checkpoints"):
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({name!r}) is not None)"
        run(env / "bin" / "python", "-c", code, cwd=tmp_path)
