"""What the compiled programs of a generation keep in memory, as XLA reports it; nothing is run."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxlm
from benchmarks.costs import nbytes
from benchmarks.loop_state import filled, settings_for
from jaxlm.loop import cache_dtype, decode_loop, prefill_chunk
from jaxlm.sizes import chunk_width, ladder

CONSTANT = re.compile(r"= (\w+)\[([\d,]*)\]\S* constant\(")
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s64": 8, "u64": 8, "f64": 8}


def describe(model: jaxlm.Model, batch: int, prompt: int, lengths: list[int]) -> dict[str, Any]:
    """The prefill and the decode program at `prompt`, the largest layer, and cache and decode program at `lengths`."""
    slots = ladder(prompt + 1)
    layer = max(nbytes(part) / repeats(part) for segment in model.params["segments"] for part in segment)
    return {
        "prefill": memory(prefill_program(model, batch, prompt, slots)),
        "decode": memory(decode_program(model, batch, slots)),
        "layer_bytes": layer,
        "weight_bytes": nbytes(model.params),
        "cache_bytes": nbytes(abstract_cache(model.config, batch, slots).layers),
        "by_length": [by_length(model, batch, length) for length in lengths],
    }


def repeats(part: Any) -> int:
    """How many layers a stack of parameters holds."""
    return jax.tree.leaves(part)[0].shape[0]


def by_length(model: jaxlm.Model, batch: int, length: int) -> dict[str, Any]:
    """Bytes of the cache and of the decode program's temporaries with room for so many tokens a row."""
    cache = nbytes(abstract_cache(model.config, batch, length).layers)
    return {"length": length, "cache_bytes": cache, **memory(decode_program(model, batch, length))}


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def abstract_cache(config: jaxlm.ModelConfig, batch: int, slots: int) -> Any:
    return jax.eval_shape(lambda: jaxlm.init_cache(config, batch, slots, cache_dtype(config)))


def prefill_program(model: jaxlm.Model, batch: int, prompt: int, slots: int) -> Any:
    """The compiled first chunk of a prompt."""
    config = model.config
    width = chunk_width(prompt)
    rows = jax.ShapeDtypeStruct((batch,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((batch, width), jnp.int32)
    last = jax.ShapeDtypeStruct((batch, config.hidden_size), jnp.dtype(config.dtype))
    cache = abstract_cache(config, batch, slots)
    return prefill_chunk.lower(abstract(model.params), tokens, rows, rows, cache, last, config, 0).compile()


def decode_program(model: jaxlm.Model, batch: int, slots: int) -> Any:
    """The compiled loop of decode steps."""
    config = model.config
    state = jax.eval_shape(lambda: filled(config, batch, 0, slots))
    settings = jax.eval_shape(lambda: settings_for(config, batch))
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    return decode_loop.lower(abstract(model.params), state, settings, steps, config).compile()


def memory(compiled: Any) -> dict[str, int]:
    """Bytes of temporaries, of arguments, of what is both argument and result, and of the largest constant.

    {} where the backend does not report.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return {}
    return {
        "temporary_bytes": stats.temp_size_in_bytes,
        "argument_bytes": stats.argument_size_in_bytes,
        "aliased_bytes": stats.alias_size_in_bytes,
        "largest_constant_bytes": largest_constant(compiled.as_text() or ""),
    }


def largest_constant(text: str) -> int:
    """Bytes of the largest constant in a compiled program's text: a captured weight would be one."""
    sizes = [0]
    for kind, shape in CONSTANT.findall(text):
        sizes.append(WIDTHS.get(kind, 4) * math.prod(int(n) for n in shape.split(",") if n))
    return int(np.max(sizes))
