"""GGUF files of models with fused, latent or many weights, written as llama.cpp's converter writes them, against logits
of the published code."""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from family_cases import cases, reference, relative_error
from family_checks import logits_at_once
from foreign import save_gguf

from jaxlm.conversion import load_source
from jaxlm.conversion.export import export_hf
from jaxlm.errors import ConfigError

Config = dict[str, Any]
Tensors = Iterator[tuple[str, np.ndarray]]
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "gate": "ffn_gate_inp",
    "router": "ffn_gate_inp",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "gate_up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def plain(layer: int, part: str, array: np.ndarray, config: Config) -> Tensors:
    """One tensor under another name; part is its name within the layer."""
    stem, kind = part.rsplit(".", 1)
    stem = re.sub(r"^(mlp|feed_forward)\.", "", stem)
    shared = re.match(r"shared_experts?\.(.*)", stem)
    yield f"blk.{layer}.{PARTS[shared[1]] + '_shexp' if shared else PARTS[stem]}.{kind}", array


def paired(layer: int, part: str, array: np.ndarray, config: Config) -> Tensors:
    """Rotary rows so that lanes i and i + h/2 of a head lie side by side."""
    for name, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if name in part:
            halves = array.reshape(config[heads], 2, -1, array.shape[1])
            array = np.concatenate([np.stack([h[0], h[1]], 1).reshape(-1, array.shape[1]) for h in halves])
    yield from plain(layer, part, array, config)


def gpt_oss(layer: int, part: str, array: np.ndarray, config: Config) -> Tensors:
    if part == "self_attn.sinks":
        yield f"blk.{layer}.attn_sinks.weight", array
    elif part.startswith("mlp.experts."):
        kind = "bias" if part.endswith("_bias") else "weight"
        array = array if kind == "bias" else np.swapaxes(array, 1, 2)
        if "gate_up" in part:
            yield f"blk.{layer}.ffn_gate_exps.{kind}", np.ascontiguousarray(array[:, 0::2])
            yield f"blk.{layer}.ffn_up_exps.{kind}", np.ascontiguousarray(array[:, 1::2])
        else:
            yield f"blk.{layer}.ffn_down_exps.{kind}", np.ascontiguousarray(array)
    else:
        for name, value in plain(layer, part, array, config):
            yield name.replace("ffn_norm", "post_attention_norm"), value


def llama4(layer: int, part: str, array: np.ndarray, config: Config) -> Tensors:
    if not part.startswith("feed_forward.experts."):
        yield from plain(layer, part, array, config)
        return
    array = np.ascontiguousarray(np.swapaxes(array, 1, 2))
    if "gate_up" in part:
        half = array.shape[1] // 2
        yield f"blk.{layer}.ffn_gate_exps.weight", array[:, :half]
        yield f"blk.{layer}.ffn_up_exps.weight", array[:, half:]
    else:
        yield f"blk.{layer}.ffn_down_exps.weight", array


def latent(layer: int, part: str, array: np.ndarray, config: Config) -> Tensors:
    """Experts one by one; `stacked` joins them."""
    expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)_proj\.weight", part)
    if expert:
        yield f"blk.{layer}.ffn_{expert[2]}_exps.weight/{expert[1]}", array
    elif part.endswith("e_score_correction_bias"):
        yield f"blk.{layer}.exp_probs_b.bias", array
    elif part == "self_attn.kv_b_proj.weight":
        heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
        both = array.reshape(heads, -1, array.shape[1])
        yield f"blk.{layer}.attn_k_b.weight", np.ascontiguousarray(np.swapaxes(both[:, :nope], 1, 2))
        yield f"blk.{layer}.attn_v_b.weight", np.ascontiguousarray(both[:, nope:])
    else:
        yield from plain(layer, part, array, config)


def latent_fused(layer: int, part: str, array: np.ndarray, config: Config) -> Tensors:
    yield from (plain if "kv_b_proj" in part else latent)(layer, part, array, config)


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    single = {name: a for name, a in tensors.items() if "/" not in name}
    for name in {name.split("/")[0] for name in tensors if "/" in name}:
        count = sum(other.startswith(name + "/") for other in tensors)
        single[name] = np.stack([tensors[f"{name}/{e}"] for e in range(count)])
    return single


def convert(tensors: dict[str, np.ndarray], config: Config, how: Callable[..., Tensors]) -> dict[str, np.ndarray]:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    found: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        if name.startswith("model.layers."):
            _, _, layer, part = name.split(".", 3)
            found |= dict(how(int(layer), part, array, config))
        else:
            found[top.get(name, "output.weight")] = array
    return stacked(found)


def metadata_of(config: Config) -> dict[str, Any]:
    """What is written for every architecture."""
    rope = config["rope_parameters"]
    names = {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
        "expert_used_count": "num_experts_per_tok",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    }
    found = {key: config[field] for key, field in names.items() if config.get(field) is not None}
    experts = config.get("n_routed_experts") or config.get("num_local_experts")
    found |= {"rope.freq_base": float(rope["rope_theta"]), **({"expert_count": experts} if experts else {})}
    if rope["rope_type"] == "yarn":
        scaling = {"type": "yarn", "factor": float(rope["factor"])}
        scaling["original_context_length"] = rope["original_max_position_embeddings"]
        scaling |= {f"yarn_{name}": float(rope[name]) for name in ("beta_fast", "beta_slow")}
        found |= {f"rope.scaling.{name}": value for name, value in scaling.items()}
    return found


def phi3_extra(config: Config) -> dict[str, Any]:
    rope, original = config["rope_parameters"], config["original_max_position_embeddings"]
    width = config["hidden_size"] // config["num_attention_heads"]
    extra = {
        "rope.scaling.original_context_length": original,
        "rope.dimension_count": int(rope["partial_rotary_factor"] * width),
        "attention.sliding_window": config["sliding_window"] or 0,
    }
    if rope["rope_type"] == "longrope":
        grown = config["max_position_embeddings"] / original
        extra["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(grown) / math.log(original))
        extra |= {f"rope_factors_{k}.weight": np.array(rope[f"{k}_factor"], np.float32) for k in ("long", "short")}
    return extra


def gpt_oss_extra(config: Config) -> dict[str, Any]:
    size = config["intermediate_size"]
    return {"attention.sliding_window": config["sliding_window"], "expert_feed_forward_length": size}


def llama4_extra(config: Config) -> dict[str, Any]:
    rope = config["rope_parameters"]
    lengths = [2 * math.pi * rope["rope_theta"] ** (2 * i / config["head_dim"]) for i in range(config["head_dim"] // 2)]
    divisors = [1.0 if length < rope["original_max_position_embeddings"] else rope["factor"] for length in lengths]
    return {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": config["head_dim"],
        "rope_freqs.weight": np.array(divisors, np.float32),
    }


def ministral3_extra(config: Config) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return {
        "rope.dimension_count": config["head_dim"],
        "rope.scaling.yarn_log_multiplier": float(rope["mscale_all_dim"]),
        "attention.temperature_scale": float(rope["llama_4_scaling_beta"]),
        "vocab_size": config["vocab_size"],
    }


def latent_extra(config: Config) -> dict[str, Any]:
    nope, turning, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    extra = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turning,
        "attention.value_length": rank,
        "attention.key_length_mla": nope + turning,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": turning,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
        "vocab_size": config["vocab_size"],
        "rope.scaling.yarn_log_multiplier": 0.1 * config["rope_parameters"].get("mscale_all_dim", 0),
    }
    if config["rope_parameters"]["rope_type"] != "yarn":
        del extra["rope.scaling.yarn_log_multiplier"]
    extra |= {"expert_weights_norm": True} if config["model_type"] == "deepseek_v3" and config["norm_topk_prob"] else {}
    return extra | ({"attention.q_lora_rank": config["q_lora_rank"]} if config["q_lora_rank"] else {})


def latent_fused_extra(config: Config) -> dict[str, Any]:
    """As files were before the up-projections were kept apart."""
    extra = {name: value for name, value in latent_extra(config).items() if not name.endswith("_mla")}
    heads, nope, turning = (config[n] for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    widths = {"attention.key_length": nope + turning, "attention.value_length": config["v_head_dim"]}
    return extra | widths | {"attention.head_count_kv": heads}


FILES = [
    ("phi3", "window", "phi3", plain, phi3_extra),
    ("phi3", "short", "phi3", plain, phi3_extra),
    ("phi3", "partial_tied_window", "phi3", plain, phi3_extra),
    ("gpt_oss", "published", "gpt-oss", gpt_oss, gpt_oss_extra),
    ("llama4", "published", "llama4", llama4, llama4_extra),
    ("ministral3", "grown", "mistral3", paired, ministral3_extra),
    ("deepseek_v2", "yarn_groups", "deepseek2", latent, latent_extra),
    ("deepseek_v2", "yarn_groups", "deepseek2", latent_fused, latent_fused_extra),
    ("deepseek_v2", "lite", "deepseek2", latent, latent_extra),
    ("deepseek_v2", "plain_tied", "deepseek2", latent_fused, latent_fused_extra),
    ("deepseek_v3", "yarn_groups", "deepseek2", latent, latent_extra),
    ("deepseek_v3", "interleaved_one_group", "deepseek2", latent, latent_extra),
]


def write(path: Path, row: tuple[Any, ...], drop: str = "") -> tuple[Path, Any, np.ndarray]:
    """The file of one row of `FILES`, its case and the published logits; drop: a metadata name to leave out."""
    family, name, arch, how, extra = row
    case = next(c for c in cases(family) if c.name == name)
    config, shapes, logits = reference(family, case)
    tensors, metadata = convert(case.tensors(shapes), config, how), metadata_of(config) | {"general.file_type": 0}
    for key, value in extra(config).items():
        (tensors if isinstance(value, np.ndarray) else metadata)[key] = value
    metadata.pop(drop, None)
    return save_gguf(path, arch, metadata, tensors), case, logits


@pytest.mark.parametrize("row", FILES, ids=lambda row: f"{row[0]}-{row[1]}-{row[3].__name__}")
def test_logits_and_export(row: tuple[Any, ...], tmp_path: Path) -> None:
    path, case, logits = write(tmp_path / "m.gguf", row)
    loaded = load_source(path)
    assert relative_error(logits_at_once(loaded.params, case.tokens(), loaded.config), logits) < case.tolerance
    export_hf(loaded.config, loaded.params, loaded.source.original, tmp_path / "hf")
    again = load_source(tmp_path / "hf")
    assert again.config == loaded.config
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)


def test_groups_that_an_older_file_leaves_out(tmp_path: Path) -> None:
    """Without them other experts would be chosen."""
    for row in (FILES[6], FILES[10]):
        path, *_ = write(tmp_path / "m.gguf", row, drop="expert_group_count")
        with pytest.raises(ConfigError, match="n_group"):
            load_source(path)
