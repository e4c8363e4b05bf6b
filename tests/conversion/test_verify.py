"""Verification: agreement is measured, a changed layer is found where it is, a damaged golden file is refused."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from family_cases import cases, reference, write_case

import jaxlm
from jaxlm.cli import main
from jaxlm.conversion.verify import (
    PROMPTS,
    compare,
    divergence,
    load_golden,
    prompt_ids,
    read_ours,
    reading,
    save_golden,
    verify,
)
from jaxlm.errors import CheckpointError
from jaxlm.generate import Model

NAMES = {"source": "a", "reference": "b", "dtype": "float32", "precision": "default"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("verify"), "llama", cases("llama")[0])


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return jaxlm.load(folder)


@pytest.fixture(scope="module")
def golden(folder: Path, model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers would leave it; its agreement with transformers is what the parity tests are for."""
    path = tmp_path_factory.mktemp("golden") / "golden.npz"
    save_golden(path, [read_ours(model, ids) for ids in prompt_ids(model)], "llama")
    return path


def changed(model: Model, layer: int) -> Model:
    """The model with one layer's output projection doubled."""
    segments = jax.tree.map(lambda a: a, model.params["segments"])
    attn = dict(segments[0][0]["attn"])
    attn["o"] = attn["o"].at[layer].multiply(2.0)
    segments = (({**segments[0][0], "attn": attn}, *segments[0][1:]), *segments[1:])
    return replace(model, params={**model.params, "segments": segments})


def test_logits_of_a_reading_are_the_published_ones(folder: Path, model: Model) -> None:
    case = cases("llama")[0]
    ours = read_ours(model, case.tokens()[0].tolist())
    np.testing.assert_allclose(ours.logits, reference("llama", case)[2], rtol=1e-4, atol=1e-4)


def test_agrees_with_its_golden_file(folder: Path, model: Model, golden: Path) -> None:
    found = verify(model, folder, golden=golden)
    assert found.passed and found.first_departure is None and found.top1 == 1.0 and abs(found.kl) < 1e-6
    assert len(found.layers) == len(model.config.layers) + 1
    assert golden.stat().st_size < 300_000


@pytest.mark.parametrize("layer", [0, 1])
def test_the_first_layer_that_departs_is_named(folder: Path, model: Model, golden: Path, layer: int) -> None:
    found = verify(changed(model, layer), folder, golden=golden)
    assert not found.passed and found.first_departure == layer + 1
    assert found.kl > 1e-6 and found.logits_relative_error > found.tolerance


def test_nan_never_passes(folder: Path, model: Model, golden: Path) -> None:
    broken = {**model.params, "final_norm": jax.tree.map(lambda a: a * np.nan, model.params["final_norm"])}
    found = verify(replace(model, params=broken), folder, golden=golden)
    assert not found.passed and found.first_departure == len(model.config.layers)


def test_divergence_is_that_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    states, one, other = rng.normal(size=(2, 5, 8)), rng.normal(size=(5, 16)), rng.normal(size=(5, 16))
    pair = (reading([0] * 5, states, one), reading([0] * 5, states, other))
    p, q = (np.exp(a) / np.exp(a).sum(-1, keepdims=True) for a in (other, one))
    assert divergence([pair]) == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-9)


def test_another_models_golden_file_is_refused(folder: Path, model: Model, tmp_path: Path) -> None:
    ours = [read_ours(model, [1, 2, 3])]
    with pytest.raises(CheckpointError, match="states"):
        compare(ours, [replace(ours[0], states=ours[0].states[1:])], 1e-4, NAMES)


@pytest.mark.parametrize("damage", ["cut", "text", "other"])
def test_a_damaged_golden_file_is_one_clear_error(golden: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "g.npz"
    if damage == "cut":
        path.write_bytes(golden.read_bytes()[:-2000])
    elif damage == "text":
        path.write_text("hello")
    else:
        np.savez(path, a=np.zeros(3))
    with pytest.raises(CheckpointError, match=r"g\.npz"):
        load_golden(path)


def test_command_says_pass_or_fail(
    folder: Path, model: Model, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(folder), "--golden", str(golden), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    other = tmp_path / "other.npz"
    save_golden(other, [read_ours(changed(model, 1), ids) for ids in prompt_ids(model)], "changed")
    assert main(["verify", str(folder), "--golden", str(other), "--quiet"]) == 1
    assert "FAIL" in capsys.readouterr().out
    assert main(["verify", str(folder), "--golden", str(tmp_path / "none.npz"), "--quiet"]) == 2


def test_prompts_fit_any_vocabulary(model: Model) -> None:
    prompts = prompt_ids(model)
    assert len(prompts) == len(PROMPTS)
    assert all(0 <= i < model.config.vocab_size for ids in prompts for i in ids)


@pytest.mark.parity
def test_transformers_is_the_reference(folder: Path, model: Model, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    kept = tmp_path / "golden.npz"
    found = verify(model, folder, keep_golden=kept)
    assert found.passed and found.reference == "transformers"
    assert verify(model, folder, golden=kept).passed
    checkpoint = tmp_path / "checkpoint"
    jaxlm.convert(folder, checkpoint)
    assert verify(jaxlm.load(checkpoint), checkpoint).passed
