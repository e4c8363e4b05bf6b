"""What a checkpoint holds and what it needs, from its headers alone: no weights are loaded."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.cache import init_cache
from jaxlm.checkpoints import is_checkpoint, read_checkpoint, resolve
from jaxlm.config import DTYPES, AttentionSpec, ModelConfig, MoESpec
from jaxlm.conversion import open_source
from jaxlm.load import size
from jaxlm.params import abstract_params


def describe(source: str | Path) -> dict[str, Any]:
    """Facts about a checkpoint as a JSON-ready dict; sizes in bytes."""
    path = resolve(source)
    if is_checkpoint(path):
        checkpoint = read_checkpoint(path)
        config, kind, files = checkpoint.config, "jaxlm checkpoint", [f.size for f in checkpoint.files.values()]
    else:
        opened = open_source(path)
        config, files = opened.config, list(opened.files.values())
        kind = {"hf": "Hugging Face folder", "gguf": "GGUF file"}[opened.kind]
    return {"source": str(source), "path": str(path), "kind": kind, "file_bytes": sum(files)} | facts(config)


def facts(config: ModelConfig) -> dict[str, Any]:
    """What follows from the config."""
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))
    return {
        "parameters": count,
        "layers": len(config.layers),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_positions": config.max_positions,
        "tie_embeddings": config.tie_embeddings,
        "dtype": config.dtype,
        "segments": [{"repeat": s.repeat, "unit": [layer_line(spec) for spec in s.unit]} for s in config.segments],
        "weight_bytes": {dtype: count * jnp.dtype(dtype).itemsize for dtype in DTYPES},
        "cache_bytes": {str(n): cache_bytes(config, n) for n in (1024, config.max_positions)},
    }


def layer_line(spec: Any) -> str:
    """One layer in words."""
    attn, work = spec.attention, spec.ffn
    if isinstance(attn, AttentionSpec):
        text = f"attention {attn.num_heads} heads x {attn.head_dim}, {attn.num_kv_heads} key/value heads"
        text += f", window {attn.window}" if attn.window else f", chunks of {attn.chunk}" if attn.chunk else ""
    else:
        text = f"latent attention {attn.num_heads} heads, latent {attn.kv_rank} + {attn.rope_dim}"
    if isinstance(work, MoESpec):
        inner = work.expert.intermediate_size
        return f"{text}; {work.top_k} of {work.num_experts} experts x {inner} {work.expert.activation}"
    return f"{text}; ffn {work.intermediate_size} {work.activation}"


def cache_bytes(config: ModelConfig, tokens: int) -> int:
    """The size of a cache for one row of so many tokens."""
    cache = jax.eval_shape(lambda: init_cache(config, 1, tokens))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.layers))


def render(found: Mapping[str, Any]) -> str:
    """The facts as lines for a person."""
    weights = ", ".join(f"{size(n)} as {dtype}" for dtype, n in found["weight_bytes"].items())
    caches = ", ".join(f"{size(n)} for {tokens} tokens" for tokens, n in found["cache_bytes"].items())
    rows = [
        ("source", found["path"]),
        ("kind", f"{found['kind']}, {size(found['file_bytes'])} on disk"),
        ("parameters", f"{found['parameters'] / 1e6:,.1f} million, {found['dtype']}"),
        ("hidden size", str(found["hidden_size"])),
        ("vocabulary", f"{found['vocab_size']}" + (", head tied to the embeddings" if found["tie_embeddings"] else "")),
        ("context", f"{found['max_positions']} tokens"),
        *(("layers", f"{s['repeat']} x {line}") for s in found["segments"] for line in s["unit"]),
        ("weights", weights),
        ("cache", f"{caches}, a row"),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in rows)
