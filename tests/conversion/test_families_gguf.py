"""Every family that GGUF has names for: a file written by the converter's rules gives the published logits."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from family_cases import Case, cases, family_names, reference, relative_error
from family_checks import logits_at_once
from foreign_gguf import Gguf, write_gguf
from safetensors.numpy import load_file

from jaxlm.conversion import load_source
from jaxlm.conversion.export import export_hf


def written(family: str) -> Gguf | None:
    return getattr(importlib.import_module(f"families.{family}"), "GGUF", None)


CASES = [
    pytest.param(family, case, how, id=f"{family}-{case.name}")
    for family in family_names()
    if (how := written(family))
    for case in cases(family)
    if not how.cases or case.name in how.cases
]


@pytest.mark.parametrize(("family", "case", "how"), CASES)
def test_file_gives_the_published_logits(family: str, case: Case, how: Gguf, tmp_path: Path) -> None:
    config, shapes, logits = reference(family, case)
    tensors = case.tensors(shapes)
    loaded = load_source(write_gguf(tmp_path / "m.gguf", how, config, tensors))
    assert relative_error(logits_at_once(loaded.params, case.tokens(), loaded.config), logits) < case.tolerance
    export_hf(loaded.config, loaded.params, loaded.source.original, tmp_path / "out")
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == tensors.keys()
    for name, array in out.items():
        if how.exact:
            np.testing.assert_array_equal(array, tensors[name], err_msg=name)
    again = load_source(tmp_path / "out")
    assert again.config == loaded.config
