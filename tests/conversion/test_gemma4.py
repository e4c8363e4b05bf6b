"""What only Gemma 4's configs and files have: two spellings of the full layers' widths, unused weights, refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import cases, reference, relative_error
from family_checks import logits_at_once
from foreign import save_folder

from jaxlm.config import AttentionSpec, FFNSpec, LayerInput, LayerSpec, ModelConfig
from jaxlm.conversion import load_source
from jaxlm.conversion.families.gemma4 import translate
from jaxlm.conversion.fields import Fields
from jaxlm.errors import CheckpointError, ConfigError

SHARED = cases("gemma4")[0]


@pytest.mark.parametrize("case", cases("gemma4"), ids=lambda case: case.name)
def test_both_spellings_say_the_same(case: Any) -> None:
    written = reference("gemma4", case)[0]
    assert "per_layer_config" in written and "global_head_dim" not in written
    published = {k: v for k, v in written.items() if k != "per_layer_config"}
    names = ("global_head_dim", "num_global_key_value_heads")
    published |= {name: case.config[name] for name in names if name in case.config}
    assert translate(Fields(published)) == translate(Fields(written))


def test_a_multimodal_folder_with_weights_that_nothing_uses(tmp_path: Path) -> None:
    config, shapes, logits = reference("gemma4", SHARED)
    tensors = {n.replace("model.", "model.language_model.", 1): a for n, a in SHARED.tensors(shapes).items()}
    unused = ("language_model.layers.5.self_attn.k_proj", "language_model.layers.6.self_attn.k_norm", "vision_tower.x")
    extra = {f"model.{name}.weight": np.ones((2, 2), np.float32) for name in unused}
    top = {"model_type": "gemma4", "text_config": config, "vision_config": {"hidden_size": 8}, "audio_config": None}
    loaded = load_source(save_folder(tmp_path / "in", top, tensors | extra))
    assert relative_error(logits_at_once(loaded.params, SHARED.tokens(), loaded.config), logits) < SHARED.tolerance
    wrong = {"model.language_model.layers.1.self_attn.v_norm.weight": np.ones((16,), np.float32)}
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_norm"):
        load_source(save_folder(tmp_path / "wrong", top, tensors | wrong))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_kv_shared_layers", 7),
        ("num_kv_shared_layers", 6),
        ("use_bidirectional_attention", "all"),
        ("final_logit_softcapping", 0.0),
        ("top_k_experts", "2"),
    ],
)
def test_refused_fields(field: str, value: Any, tmp_path: Path) -> None:
    config, shapes, _ = reference("gemma4", SHARED)
    with pytest.raises(ConfigError, match=field):
        load_source(save_folder(tmp_path, config | {field: value}, SHARED.tensors(shapes)))


def test_layers_that_share_must_fit() -> None:
    keeper = LayerSpec(AttentionSpec(4, 2, 6, kv_keep="a"), FFNSpec(8))
    user = LayerSpec(AttentionSpec(8, 2, 6, kv_from="a"), FFNSpec(8))
    ModelConfig(13, 8, (keeper, user, user))
    wrong = [
        (user, keeper),
        (keeper, keeper),
        (keeper, replace(user, attention=replace(user.attention, window=3))),
        (keeper, replace(user, attention=replace(user.attention, num_kv_heads=4))),
        (keeper, replace(user, layer_input=LayerInput(4, 13))),
    ]
    for layers in wrong:
        with pytest.raises(ConfigError):
            ModelConfig(13, 8, layers)
