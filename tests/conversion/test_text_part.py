"""The language model of a checkpoint that also holds towers is the one that the plain checkpoint holds."""

from pathlib import Path

import jax
import numpy as np
import pytest
from family_cases import cases, reference
from foreign import save_folder

from jaxlm.conversion import load_source
from jaxlm.conversion.export import export_hf

# Family, the whole's model_type and class, how names begin instead of "model." and before "lm_head.", a tower's tensor.
WHOLES = [
    ("llama4", "llama4", "language_model.model.", "language_model.", "vision_model.patch.weight"),
    ("ministral3", "mistral3", "language_model.model.", "language_model.", "vision_tower.patch.weight"),
    ("ministral3", "mistral3", "model.language_model.", "", "model.multi_modal_projector.linear_1.weight"),
]


@pytest.mark.parametrize(("family", "kind", "inner", "outer", "tower"), WHOLES)
def test_same_model(family: str, kind: str, inner: str, outer: str, tower: str, tmp_path: Path) -> None:
    case = cases(family)[0]
    config, shapes, _ = reference(family, case)
    tensors = case.tensors(shapes)
    whole = {"model_type": kind, "architectures": ["SomeForConditionalGeneration"], "text_config": config}
    whole |= {"vision_config": {"hidden_size": 4}, "image_token_index": 9, "tie_word_embeddings": False}
    renamed = {inner + n.removeprefix("model.") if n.startswith("model.") else outer + n: a for n, a in tensors.items()}
    plain = load_source(save_folder(tmp_path / "plain", config, tensors))
    within = load_source(save_folder(tmp_path / "whole", whole, renamed | {tower: np.ones((2, 3), np.float32)}))
    assert within.config == plain.config
    jax.tree.map(np.testing.assert_array_equal, within.params, plain.params)
    export_hf(within.config, within.params, within.source.original, tmp_path / "out")
    again = load_source(tmp_path / "out")
    assert again.source.original["model_type"] == family.replace("llama4", "llama4_text")
    jax.tree.map(np.testing.assert_array_equal, again.params, plain.params)
