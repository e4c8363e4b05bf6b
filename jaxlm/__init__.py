"""jaxlm: the JAX runtime for open-weight language models.

The path of a token, one module per step: tokenizer, model (embed, blocks of attention and ffn, lm_head), sample, cache.
Everything is a pure function over a parameter pytree, a frozen config and a cache that is a plain value.
"""

from pathlib import Path

# In a checkout that is not installed, jaxlm.conversion and jaxlm.checkpoints lie beside this folder.
if (Path(__file__).parents[1] / "pyproject.toml").exists():
    __path__.append(str(Path(__file__).parents[1]))

from jaxlm.attention import attention
from jaxlm.cache import KVCache, init_cache
from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, NormSpec, RopeSpec
from jaxlm.errors import JaxlmError
from jaxlm.ffn import ffn
from jaxlm.generate import Generation, Model, generate, stream
from jaxlm.ledger import compile_ledger
from jaxlm.load import convert, load
from jaxlm.model import decode_step, embed, forward, lm_head, prefill
from jaxlm.params import init_params, unstack
from jaxlm.reuse import PrefixStore
from jaxlm.sample import sample
from jaxlm.warm import warmup

__all__ = [
    "AttentionSpec",
    "FFNSpec",
    "Generation",
    "JaxlmError",
    "KVCache",
    "LayerSpec",
    "Model",
    "ModelConfig",
    "NormSpec",
    "PrefixStore",
    "RopeSpec",
    "attention",
    "compile_ledger",
    "convert",
    "decode_step",
    "embed",
    "ffn",
    "forward",
    "generate",
    "init_cache",
    "init_params",
    "lm_head",
    "load",
    "prefill",
    "sample",
    "stream",
    "unstack",
    "warmup",
]
