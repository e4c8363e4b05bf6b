"""Every family against stored logits of transformers: at once, in steps, unrolled, in a batch; and exported again."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from family_cases import Case, all_cases, first_cases, reference, relative_error, write_case
from family_checks import kept_positions, logits_at_once, logits_in_steps
from safetensors.numpy import load_file

from jaxlm import forward, unstack
from jaxlm.conversion import load_source
from jaxlm.conversion.export import export_hf

CASES = [pytest.param(family, case, id=f"{family}-{case.name}") for family, case in all_cases()]
FIRST = [pytest.param(family, case, id=family) for family, case in first_cases()]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_logits_are_those_of_the_published_code(family: str, case: Case, tmp_path: Path) -> None:
    loaded = load_source(write_case(tmp_path, family, case))
    ours = logits_at_once(loaded.params, case.tokens(), loaded.config)
    assert relative_error(ours, reference(family, case)[2]) < case.tolerance


@pytest.mark.parametrize(("family", "case"), FIRST)
def test_steps_with_a_cache_give_the_same_logits(family: str, case: Case, tmp_path: Path) -> None:
    loaded = load_source(write_case(tmp_path, family, case))
    ours = logits_in_steps(loaded.params, case.tokens(), loaded.config)
    assert relative_error(ours, reference(family, case)[2][kept_positions(case.length)]) < case.tolerance


@pytest.mark.parametrize(("family", "case"), FIRST)
def test_unrolled_layers_and_batches_give_the_same_logits(family: str, case: Case, tmp_path: Path) -> None:
    loaded = load_source(write_case(tmp_path, family, case))
    both = np.concatenate([case.tokens()[:, ::-1], case.tokens()])
    run = jax.jit(forward, static_argnums=2)
    expected = reference(family, case)[2]
    assert relative_error(np.asarray(run(loaded.params, both, loaded.config))[1], expected) < case.tolerance
    unrolled = run(unstack(loaded.params), case.tokens(), loaded.config)
    assert relative_error(np.asarray(unrolled)[0], expected) < case.tolerance


@pytest.mark.parametrize(("family", "case"), CASES)
def test_export_gives_back_every_bit(family: str, case: Case, tmp_path: Path) -> None:
    folder = write_case(tmp_path / "in", family, case, "bfloat16")
    loaded = load_source(folder)
    assert loaded.config.dtype == "bfloat16"
    export_hf(loaded.config, loaded.params, loaded.source.original, tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name].view(np.uint16), array.view(np.uint16), err_msg=name)
    config = json.loads((folder / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {"dtype": "bfloat16"}
