"""GGUF files of models with latent attention: their names, and the two ways in which they keep the up-projections."""

from collections.abc import Mapping
from typing import Any

from jaxlm.conversion.family import Row
from jaxlm.conversion.gguf_names import gguf_rows
from jaxlm.conversion.transforms import FusedHeads, HeadsApart

TARGETS = {
    "blk.{bid}.attn_q_a": ("attn.q_down", "attn.q_down_bias"),
    "blk.{bid}.attn_q_b": ("attn.q_up", ""),
    "blk.{bid}.attn_q_a_norm": ("attn.q_norm.scale", ""),
    "blk.{bid}.attn_kv_a_mqa": ("attn.kv_down", "attn.kv_down_bias"),
    "blk.{bid}.attn_kv_a_norm": ("attn.kv_norm.scale", ""),
    "blk.{bid}.attn_k_b": ("attn.k_up", ""),
    "blk.{bid}.attn_v_b": ("attn.v_up", ""),
}
NAMES = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "expert_count": "n_routed_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
    "rope.dimension_count": "qk_rope_head_dim",
}
GATING = {1: "softmax", 2: "sigmoid"}  # gguf.ExpertGatingFuncType


def rows(arch: str) -> tuple[Row, ...]:
    """Newer files have k_b, transposed, and v_b; older ones the two fused as published."""
    apart = {"attn.k_up": HeadsApart(transposed=True), "attn.v_up": HeadsApart()}
    fused = Row(("attn.k_up", "attn.v_up"), "blk.{i}.attn_kv_b.weight", FusedHeads())
    return (*gguf_rows(arch, apart, TARGETS), fused)


def fields(metadata: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """The widths of a head, which newer files give beside those of the latent."""
    key = metadata.get("attention.key_length_mla", metadata.get("attention.key_length"))
    value = metadata.get("attention.value_length_mla", metadata.get("attention.value_length", key))
    turning = metadata.get("rope.dimension_count")
    found: dict[str, Any] = {"v_head_dim": value, "attention_bias": "blk.0.attn_kv_a_mqa.bias" in tensors}
    if type(key) is int and type(turning) is int:
        found["qk_nope_head_dim"] = key - turning
    if "expert_gating_func" in metadata:
        found["expert_gating_func"] = GATING.get(metadata["expert_gating_func"], metadata["expert_gating_func"])
    return found
