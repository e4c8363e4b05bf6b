"""Every family against transformers run live, on models that transformers itself saved."""

from pathlib import Path

import numpy as np
import pytest
from family_cases import Case, all_cases, cases, reference, relative_error, write_case
from family_checks import kept_positions, logits_at_once, logits_in_steps

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from make_references import load_theirs, make_case, their_logits  # noqa: E402

from jaxlm.conversion import load_source  # noqa: E402
from jaxlm.conversion.export import export_hf  # noqa: E402

CASES = [pytest.param(family, case, id=f"{family}-{case.name}") for family, case in all_cases()]
BFLOAT16 = 0.03  # Both sides round every activation to 8 bits, in different orders.


@pytest.mark.parametrize(("family", "case"), CASES)
def test_logits(family: str, case: Case, tmp_path: Path) -> None:
    folder = write_case(tmp_path, family, case)
    loaded = load_source(folder)
    theirs = their_logits(load_theirs(folder, attention=case.attention), case.tokens())[0]
    assert relative_error(logits_at_once(loaded.params, case.tokens(), loaded.config), theirs) < case.tolerance
    steps = logits_in_steps(loaded.params, case.tokens(), loaded.config)
    assert relative_error(steps, theirs[kept_positions(case.length)]) < case.tolerance


@pytest.mark.parametrize(("family", "case"), CASES)
def test_bfloat16_file(family: str, case: Case, tmp_path: Path) -> None:
    """Widened to float32 the weights are exact; left as they are, the logits are those of bfloat16 arithmetic."""
    folder = write_case(tmp_path, family, case, "bfloat16")
    theirs = their_logits(load_theirs(folder, torch.float32, case.attention), case.tokens())[0]
    for dtype, bound in (("float32", case.tolerance), (None, BFLOAT16)):
        loaded = load_source(folder, dtype)
        assert relative_error(logits_at_once(loaded.params, case.tokens(), loaded.config), theirs) < bound


@pytest.mark.parametrize(("family", "case"), CASES)
def test_transformers_loads_what_is_exported(family: str, case: Case, tmp_path: Path) -> None:
    loaded = load_source(write_case(tmp_path / "in", family, case))
    export_hf(loaded.config, loaded.params, loaded.source.original, tmp_path / "out", shard_bytes=20_000)
    theirs = their_logits(load_theirs(tmp_path / "out", attention=case.attention), case.tokens())[0]
    assert relative_error(theirs, reference(family, case)[2]) < 1e-6


@pytest.mark.parametrize("family", sorted({family for family, _ in all_cases()}))
def test_stored_references_are_current(family: str) -> None:
    case = cases(family)[0]
    config, shapes, logits = make_case(case)
    stored_config, stored_shapes, stored_logits = reference(family, case)
    assert shapes == stored_shapes
    assert {**config, "transformers_version": None} == {**stored_config, "transformers_version": None}
    np.testing.assert_allclose(logits, stored_logits, rtol=1e-5, atol=1e-5)
