"""GGUF files of the Gemma family, written as llama.cpp's converter writes them, against the folder they came from."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from family_cases import Case, cases, reference, relative_error
from family_checks import logits_at_once
from foreign import save_folder, save_gguf
from foreign_gguf import common_metadata

from jaxlm.conversion import load_source
from jaxlm.conversion.export import export_hf
from jaxlm.errors import ConfigError

LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, four_norms: bool) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    renamed = "ffn_norm" if part == "post_attention_layernorm" and not four_norms else NAMES[part]
    return f"blk.{layer}.{renamed}.{kind}"


def gguf_tensors(case: Case, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Norms are stored as the factor 1 + w."""
    four_norms = case.config["model_type"] != "gemma"
    tensors = case.tensors(shapes)
    return {gguf_name(n, four_norms): a + np.float32(1) if "norm" in n else a for n, a in tensors.items()}


def gguf_metadata(config: dict[str, Any]) -> dict[str, Any]:
    metadata = common_metadata(config) | {"general.file_type": 0}
    caps = {name: config.get(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    metadata |= {name: float(value) for name, value in caps.items() if value}
    return metadata | ({"attention.sliding_window": config["sliding_window"]} if "sliding_window" in config else {})


def small(family: str, **changes: Any) -> Case:
    """The family's first case as the converter's files can say it: its own pattern, scores over sqrt(head_dim)."""
    first = cases(family)[0]
    config = {k: v for k, v in first.config.items() if k != "layer_types"} | {"query_pre_attn_scalar": 10, **changes}
    if family == "gemma":
        config.pop("query_pre_attn_scalar")
    return Case("gguf", config, length=first.length, seed=9, norm=0.0)


def both(case: Case, folder: Path, shapes: dict[str, tuple[int, ...]], **metadata: Any) -> tuple[Any, Any]:
    """(the model from a Hugging Face folder, the same from a GGUF file)."""
    defaults = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    config = {**defaults, **case.config}
    arch = case.config["model_type"].removesuffix("_text")
    path = save_gguf(folder / "m.gguf", arch, gguf_metadata(config) | metadata, gguf_tensors(case, shapes))
    published = {k: v for k, v in config.items() if v is not None}
    return load_source(save_folder(folder / "hf", published, case.tensors(shapes))), load_source(path)


def check_equal(case: Case, hf: Any, gguf: Any, folder: Path) -> None:
    """The same structure and logits; and out to a folder and in again."""
    tokens = case.tokens()
    expected = logits_at_once(hf.params, tokens, hf.config)
    assert relative_error(logits_at_once(gguf.params, tokens, gguf.config), expected) < 1e-5
    export_hf(gguf.config, gguf.params, gguf.source.original, folder / "out")
    again = load_source(folder / "out")
    assert again.config == gguf.config
    jax.tree.map(np.testing.assert_array_equal, again.params, gguf.params)


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
def test_file_equals_folder(family: str, tmp_path: Path) -> None:
    rope = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    case = small(family, **({"num_hidden_layers": 7, "rope_parameters": rope} if family == "gemma3" else {}))
    shapes = shapes_of(family, case)
    check_equal(case, *both(case, tmp_path, shapes), tmp_path)


def shapes_of(family: str, case: Case) -> dict[str, tuple[int, ...]]:
    """Those of the family's first case, for the number of layers of this one."""
    _, known, _ = reference(family, cases(family)[0])
    layer = {n.split(".", 3)[3]: s for n, s in known.items() if n.startswith("model.layers.0.")}
    outer = {n: s for n, s in known.items() if ".layers." not in n}
    numbers = range(case.config["num_hidden_layers"])
    return outer | {f"model.layers.{i}.{n}": s for i in numbers for n, s in layer.items()}


@pytest.mark.parametrize(("pattern", "kinds"), [(2, "sfsf"), ([False, True, True, False], "fssf")])
def test_a_pattern_in_the_file(pattern: Any, kinds: str, tmp_path: Path) -> None:
    names = {"s": "sliding_attention", "f": "full_attention"}
    plain = {"rope_type": "default"}
    rope = {"full_attention": {**plain, "rope_theta": 1e6}, "sliding_attention": {**plain, "rope_theta": 77.0}}
    case = small("gemma3", num_hidden_layers=4, layer_types=[names[k] for k in kinds], rope_parameters=rope)
    extra = {"attention.sliding_window_pattern": pattern, "rope.freq_base_swa": 77.0}
    check_equal(case, *both(case, tmp_path, shapes_of("gemma3", case), **extra), tmp_path)


def test_a_file_without_a_window_has_no_sliding_layers(tmp_path: Path) -> None:
    case = small("gemma3", num_hidden_layers=2, sliding_window=4)
    metadata = {k: v for k, v in gguf_metadata({**case.config, "rms_norm_eps": 1e-6}).items() if "window" not in k}
    shapes = shapes_of("gemma3", case)
    loaded = load_source(save_gguf(tmp_path / "m.gguf", "gemma3", metadata, gguf_tensors(case, shapes)))
    assert {layer.attention.window for layer in loaded.config.layers} == {0}


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_model_scales_by_its_width_over_its_heads(family: str, layers: int, tmp_path: Path) -> None:
    case = small(family, num_hidden_layers=layers)
    shapes = shapes_of(family, case)
    config = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **case.config}
    path = save_gguf(tmp_path / "m.gguf", family, gguf_metadata(config), gguf_tensors(case, shapes))
    loaded = load_source(path)
    assert {layer.attention.scale for layer in loaded.config.layers} == {(40 // 8) ** -0.5}


TOP = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "boi_token_index": 60,
    "eos_token_id": [1, 5],
    "image_token_index": 62,
    "mm_tokens_per_image": 4,
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 8},
}
TOWERS = ("vision_tower.vision_model.encoder.layers.0.fc1.weight", "multi_modal_projector.mm_soft_emb_norm.weight")


@pytest.mark.parametrize(("prefix", "tower"), [("language_model.model.", ""), ("model.language_model.", "model.")])
def test_the_language_model_of_a_multimodal_folder(prefix: str, tower: str, tmp_path: Path) -> None:
    """Loaded alone and written alone, under either naming."""
    case = cases("gemma3")[0]
    config, shapes, logits = reference("gemma3", case)
    tensors = {prefix + n.removeprefix("model."): a for n, a in case.tensors(shapes).items()}
    tensors |= {tower + name: np.ones((2, 2), np.float32) for name in TOWERS}
    loaded = load_source(save_folder(tmp_path / "in", TOP | {"text_config": config}, tensors))
    assert relative_error(logits_at_once(loaded.params, case.tokens(), loaded.config), logits) < case.tolerance
    assert loaded.source.eos_ids == (1, 5)
    export_hf(loaded.config, loaded.params, loaded.source.original, tmp_path / "out")
    again = load_source(tmp_path / "out")
    assert again.config == loaded.config and again.source.original["model_type"] == "gemma3_text"


@pytest.mark.parametrize(
    ("top", "text", "message"),
    [
        ({"new_field": 3}, {}, "new_field"),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, "one value"),
        ({}, {"model_type": "llama"}, "gemma3_text"),
        ({}, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({}, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({}, {"sliding_window": 0}, "sliding_window"),
        ({"quantization_config": {"quant_method": "gptq"}}, {}, "gptq"),
    ],
)
def test_what_a_multimodal_config_may_not_say(top: Any, text: Any, message: str, tmp_path: Path) -> None:
    case = cases("gemma3")[0]
    config, shapes, _ = reference("gemma3", case)
    with pytest.raises(ConfigError, match=message):
        load_source(save_folder(tmp_path, TOP | top | {"text_config": config | text}, case.tensors(shapes)))
