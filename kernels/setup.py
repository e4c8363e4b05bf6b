"""Builds the kernels as a plain shared library with the C++ compiler at hand."""

import importlib.util
import sysconfig
from pathlib import Path

from setuptools import Extension, setup


def jaxlib_headers() -> str | None:
    """Headers of the jaxlib already installed here: an isolated build does not import it, but can read its files."""
    roots = [Path(sysconfig.get_paths()[name]) / "jaxlib" for name in ("platlib", "purelib")]
    spec = importlib.util.find_spec("jaxlib")
    roots += [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = [root / "include" for root in roots if (root / "include/xla/ffi/api/ffi.h").is_file()]
    return str(found[0]) if found else None


headers = jaxlib_headers()
setup(
    setup_requires=[] if headers else ["jaxlib"],
    ext_modules=[
        Extension(
            "jaxlm_cpu._kernels",
            sources=sorted(map(str, Path("src").glob("*.cc"))),
            depends=["setup.py", *map(str, Path("src").glob("*.h"))],
            include_dirs=["src"] + ([headers] if headers else []),
            extra_compile_args=["-std=c++17", "-O3", "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-pthread"],
            extra_link_args=["-pthread"],
        )
    ],
)
