"""What a step has to read and to compute, by arithmetic: the yardstick beside every measured time.

MBU, the share of the read bandwidth that decoding reaches, is bytes per step x steps per second / measured bandwidth
(Databricks, "LLM inference performance engineering", 2023). MFU, the share of the matrix-product rate, is model FLOPs
per second / measured rate (Chowdhery et al. 2022, PaLM, appendix B), here with the attention FLOPs of the keys that a
query may see and no others. Model FLOPs do not depend on how a product is carried out: 2 per weight and token, 2 per
lane of a query-key and of a weight-value product; norms, activations and softmax are left out.
"""

import math
from typing import Any

import jax
import numpy as np

from jaxlm.config import AttentionSpec, LatentAttentionSpec, LayerSpec, ModelConfig, MoESpec
from jaxlm.params import Param, declare

BACKWARD = 2  # Products of the backward pass per product of the forward pass: by input and by weight.
ROW_TABLES = ("table", "positions", "layer_table")  # Of these, a token reads one row.


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, quantised nodes as they are stored."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def step_bytes(config: ModelConfig, params: Any, batch: int, length: int, cache_itemsize: int) -> float:
    """The least that a decode step of `batch` rows reads, each having `length` tokens in the cache."""
    return weight_bytes(config, params, batch) + batch * cache_bytes(config, length, cache_itemsize)


def weight_bytes(config: ModelConfig, params: Any, batch: int) -> float:
    """Bytes of weights that a step of `batch` tokens reads; `params` may be abstract.

    All matrices once, of experts only those that are chosen, of an embedding that is not the head too a row per token.
    """
    embed = params["embed"]
    tables = [name for name in ROW_TABLES if name in embed and not (name == "table" and config.tie_embeddings)]
    rest = {name: leaf for name, leaf in params.items() if name not in ("embed", "segments")}
    total = float(nbytes(rest) + nbytes({name: leaf for name, leaf in embed.items() if name not in tables}))
    total += sum(batch * nbytes(embed[name]) / jax.tree.leaves(embed[name])[0].shape[0] for name in tables)
    for segment, layers in zip(config.segments, params["segments"], strict=True):
        for unit in layers if isinstance(layers, list) else [layers]:
            total += sum(layer_bytes(spec, layer, batch) for spec, layer in zip(segment.unit, unit, strict=True))
    return total


def layer_bytes(spec: LayerSpec, layer: Any, batch: int) -> float:
    """Bytes of a layer's weights, or of a stack of them, that `batch` tokens read."""
    total = float(nbytes(layer))
    if isinstance(spec.ffn, MoESpec):
        total -= nbytes(layer["ffn"]["experts"]) * (1 - experts_read(spec.ffn, batch) / spec.ffn.num_experts)
    if spec.beside:
        total -= nbytes(layer["beside"]["experts"]["experts"]) * (
            1 - experts_read(spec.beside, batch) / spec.beside.num_experts
        )
    return total


def experts_read(spec: MoESpec, tokens: int) -> float:
    """How many different experts that many tokens choose on average, if each chooses evenly by itself:
    E (1 - (1 - k/E)^tokens), which is k for one token."""
    return spec.num_experts * (1 - (1 - spec.top_k / spec.num_experts) ** tokens)


def cache_bytes(config: ModelConfig, length: int, itemsize: int) -> int:
    """Bytes of keys and values that a row's step reads after `length` tokens; of a windowed layer no more than the
    window. A layer that looks at another's keys reads them once more."""
    return sum(_kept(layer.attention) * seen(layer.attention, length) for layer in config.layers) * itemsize


def seen(spec: AttentionSpec | LatentAttentionSpec, length: int) -> int:
    """How many of `length` stored tokens a query can look at."""
    return min(length, spec.reach) if spec.reach else length


def _kept(spec: AttentionSpec | LatentAttentionSpec) -> int:
    """Numbers per token and layer in the cache."""
    if isinstance(spec, LatentAttentionSpec):
        return spec.kv_rank + spec.rope_dim
    return 2 * spec.num_kv_heads * spec.head_dim


def forward_flops(config: ModelConfig, start: int, count: int, heads: int) -> float:
    """FLOPs of `count` tokens of a row that has `start` already, `heads` of them with logits."""
    attention = sum(pair_flops(s.attention) * pairs(s.attention, start, count) for s in config.layers)
    return count * token_flops(config) + attention + heads * 2.0 * config.vocab_size * config.hidden_size


def train_flops(config: ModelConfig, count: int) -> float:
    """FLOPs of a training step on a row of `count` tokens, logits at each."""
    return (1 + BACKWARD) * forward_flops(config, 0, count, count)


def token_flops(config: ModelConfig) -> float:
    """FLOPs per token of all products with weights but the head's; of the experts the chosen ones."""
    tree = declare(config)
    total = _products(tree["embed"].get("layer_proj", {}))
    for segment, layers in zip(config.segments, tree["segments"], strict=True):
        for spec, layer in zip(segment.unit, layers, strict=True):
            total += _products(layer)
            if isinstance(spec.ffn, MoESpec):
                total -= _products(layer["ffn"]["experts"]) * (1 - spec.ffn.top_k / spec.ffn.num_experts)
            if spec.beside:
                unused = 1 - spec.beside.top_k / spec.beside.num_experts
                total -= _products(layer["beside"]["experts"]["experts"]) * unused
    return total


def _products(tree: Any) -> float:
    """2 FLOPs per number of every matrix; norms and biases, which start at a constant, are none."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Param))
    return 2.0 * sum(math.prod(leaf.shape) for leaf in leaves if not isinstance(leaf.init, str))


def pair_flops(spec: AttentionSpec | LatentAttentionSpec) -> int:
    """FLOPs of one query token looking at one key token, all heads: the score and the weighted value."""
    if isinstance(spec, LatentAttentionSpec):
        return 2 * spec.num_heads * (spec.nope_dim + spec.rope_dim + spec.value_dim)
    return 4 * spec.num_heads * spec.head_dim


def pairs(spec: AttentionSpec | LatentAttentionSpec, start: int, count: int) -> int:
    """How many (query, key) pairs `count` tokens after `start` others make, a token seeing itself too."""
    positions = np.arange(start, start + count, dtype=np.int64)
    chunk = getattr(spec, "chunk", 0)
    visible = positions % chunk + 1 if chunk else positions + 1
    return int(np.minimum(visible, spec.reach).sum() if spec.reach else visible.sum())
