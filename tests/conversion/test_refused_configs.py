"""What is wrong with a config.json is said by field and value, before any tensor is looked at."""

from pathlib import Path
from typing import Any

import pytest
from foreign import llama_config, llama_folder, llama_shapes, random_weights, save_folder

from jaxlm.conversion import open_source
from jaxlm.errors import ConfigError

ROPE = {"rope_type": "linear", "factor": 2.0}
CONFIGS = {
    "unknown field": ({"final_logit_softcapping": 30.0}, "'final_logit_softcapping' is 30.0"),
    "other value of a harmless field": ({"pretraining_tp": 2}, "'pretraining_tp' is 2; allowed: 1"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
    "unknown model": ({"model_type": "gpt5"}, "model_type is 'gpt5', not supported; allowed: .*llama"),
    "model not built yet": (
        {"model_type": "qwen3_next"},
        "model_type is 'qwen3_next', a known model that is not built",
    ),
    "another purpose": (
        {"architectures": ["LlamaForSequenceClassification"]},
        "LlamaForSequenceClassification.*LlamaForCausalLM",
    ),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8'; allowed: no quantisation"),
    "missing field": ({"hidden_size": None}, "'hidden_size' is missing"),
    "text for a number": ({"hidden_size": "48"}, "'hidden_size' is 48; allowed: an integer"),
    "flag for a number": ({"num_hidden_layers": True}, "'num_hidden_layers' is True"),
    "no layers": ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
    "infinite": ({"rms_norm_eps": float("inf")}, "'rms_norm_eps' is inf; allowed: a finite number"),
    "unknown activation": ({"hidden_act": "laplace"}, "'hidden_act' is laplace; allowed: gelu"),
    "groups that do not divide": ({"num_key_value_heads": 3}, "num_kv_heads is 3"),
    "unknown scaling": (
        {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
        "'rope_scaling.rope_type' is spiral; allowed: .*yarn",
    ),
    "unknown key of a scaling": ({"rope_scaling": ROPE | {"beta_fast": 32}}, "'rope_scaling.beta_fast' is 32"),
    "factor without a type": ({"rope_scaling": {"factor": 2.0}}, "'rope_scaling.factor' is 2.0"),
    "scaling without its factor": ({"rope_scaling": {"type": "linear"}}, "'rope_scaling.factor' is missing"),
    "two types": (
        {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}},
        "as linear and as dynamic|as dynamic and as linear",
    ),
    "two thetas": ({"rope_parameters": {"rope_theta": 5.0}}, "'rope_theta' is given as 10000.0 and as 5.0"),
    "two scalings": ({"rope_scaling": ROPE, "rope_parameters": {"rope_type": "default"}}, "'rope_scaling' is given as"),
    "scaling of no known shape": ({"rope_scaling": "linear"}, "'rope_scaling' is linear; allowed: an object"),
    "encoder": ({"is_encoder_decoder": True}, "'is_encoder_decoder' is True; allowed: False"),
    "per-layer settings": ({"per_layer_config": {"0": {}}}, "'per_layer_config'"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config(name: str, tmp_path: Path) -> None:
    changes, message = CONFIGS[name]
    folder = save_folder(tmp_path, llama_config(**changes), random_weights(llama_shapes(llama_config()), 0))
    with pytest.raises(ConfigError, match=message):
        open_source(folder)


def test_four_spellings_of_the_same_rotation(tmp_path: Path) -> None:
    """theta 500000 and linear factor 2: one config, whichever way it is written; null counts as nothing."""
    block = {"rope_type": "linear", "factor": 2.0}
    spellings: list[dict[str, Any]] = [
        {"rope_theta": 500000.0, "rope_scaling": block},
        {"rope_theta": 500000, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_theta": None, "rope_parameters": block | {"rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_scaling": block, "rope_parameters": block | {"rope_theta": 500000.0}},
    ]
    opened = [open_source(llama_folder(tmp_path / str(i), **changes)).config for i, changes in enumerate(spellings)]
    assert len(set(opened)) == 1
    assert opened[0] != open_source(llama_folder(tmp_path / "plain", rope_theta=500000.0)).config
