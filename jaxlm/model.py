"""From ids to logits: embed, a scan of blocks over each segment, lm_head; without a cache or carrying one on."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.attention import Past
from jaxlm.cache import KV, KVCache, capacity, slot_positions, write
from jaxlm.config import ModelConfig
from jaxlm.errors import JaxlmTypeError, RequestError
from jaxlm.layer_inputs import layer_inputs
from jaxlm.layers import run_layers
from jaxlm.linear import add_bias, project
from jaxlm.norm import norm
from jaxlm.params import Params
from jaxlm.quant import widen


def embed(
    params: Params, tokens: jax.Array, config: ModelConfig, positions: jax.Array | None = None
) -> jax.Array:
    """The table's row for each id, times embed_scale, plus the position's row and normalised where the model has that.

    tokens int32 [B,T], positions int32 [B,T], default 0..T-1 -> [B,T,D] in the table's dtype; NaN for an id that the
    table lacks.
    """
    x = rows_of(params["embed"]["table"], tokens, config.dtype)
    if config.embed_scale != 1.0:
        x = x * jnp.asarray(config.embed_scale, x.dtype)
    if config.positions:
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None, :], x.shape[:2])
        x = x + rows_of(params["embed"]["positions"], positions + config.positions.offset, config.dtype)
    return norm(params["embed"]["norm"], x, config.embed_norm) if config.embed_norm else x


def embed_layers(params: Params, tokens: jax.Array, x: jax.Array, config: ModelConfig) -> jax.Array | None:
    """What each layer takes in beside x: [L,B,T,P], or None where layers take nothing in."""
    if config.layers[0].layer_input is None:
        return None
    return layer_inputs(params, rows_of(params["embed"]["layer_table"], tokens, config.dtype), x, config)


def rows_of(table: Any, rows: jax.Array, dtype: Any) -> jax.Array:
    """table [N,...], an array or a quantised node, rows int32 [B,T] -> [B,T,...]; NaN for a row that is not there."""
    def get(a: jax.Array) -> jax.Array:
        fill = jnp.nan if jnp.issubdtype(a.dtype, jnp.floating) else 0
        return a.at[rows].get(mode="fill", fill_value=fill, wrap_negative_indices=False)

    # XLA's CPU backend widens a 16-bit table as a whole, once per loop, unless the table seems to change with the rows.
    table, rows = jax.lax.optimization_barrier((table, rows))
    return widen(jax.tree.map(get, table), dtype)


def lm_head(params: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    """The final norm, then a score for every id of the vocabulary. [..., D] -> float32 [..., V]."""
    table = params["embed" if config.tie_embeddings else "lm_head"]["table"]
    normed = norm(params.get("final_norm", {}), x, config.final_norm)
    logits = project("...D,VD->...V", normed, table, jnp.float32)
    if config.head_bias:
        logits = add_bias(logits, params["lm_head"]["bias"])
    if config.logit_scale != 1.0:
        logits = logits * config.logit_scale
    return config.logit_softcap * jnp.tanh(logits / config.logit_softcap) if config.logit_softcap else logits


def read_past(cache: KVCache, read: int | None) -> tuple[tuple[Past | None, ...], ...]:
    """Every layer's past, with the positions of all slots, or of the first `read`, which hold all that was written."""
    def past(kv: KV | None) -> Past | None:
        if kv is None:
            return None
        return Past(kv, slot_positions(cache.lengths, kv.k.shape[2])[:, :read])

    return tuple(tuple(past(kv) for kv in layers) for layers in cache.layers)


def hidden(params: Params, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """The last layer's output for whole sequences, before the final norm. int32 [B,T] -> [B,T,D]."""
    return _run_whole(params, tokens, config, False)[1]


def hidden_states(params: Params, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """The embedding and every layer's output, before the final norm. int32 [B,T] -> [L+1,B,T,D]."""
    x, _, outputs = _run_whole(params, tokens, config, True)
    return jnp.concatenate([x[None], *outputs])


def _run_whole(
    params: Params, tokens: jax.Array, config: ModelConfig, states: bool
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """(embedding, the last layer's output, with `states` those of all layers by segment)."""
    batch, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None, :], tokens.shape)
    x = embed(params, tokens, config, positions)
    inputs = embed_layers(params, tokens, x, config)
    context = jnp.full((batch,), width, jnp.int32)
    last, _, outputs = run_layers(params, x, positions, context, config, inputs=inputs, states=states)
    return x, last, outputs


def extend(
    params: Params,
    tokens: jax.Array,
    cache: KVCache,
    config: ModelConfig,
    lengths: jax.Array,
    read: int | None = None,
    context: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """Carry every row on by its first `lengths` [B] tokens of [B,T]. -> (hidden [B,T,D], cache). See `look_ahead`.

    A row whose length is outside 0..T, or that would outgrow the cache, gives NaN and leaves the cache as it was.
    """
    x, new, counts = look_ahead(params, tokens, cache, config, lengths, read, context)
    return x, write(cache, new, counts)


def look_ahead(
    params: Params,
    tokens: jax.Array,
    cache: KVCache,
    config: ModelConfig,
    lengths: jax.Array,
    read: int | None = None,
    context: jax.Array | None = None,
) -> tuple[jax.Array, tuple[Any, ...], jax.Array]:
    """Run every row's first `lengths` [B] tokens of [B,T] after what the cache holds, without writing to it.

    read: how many slots of the cache to look at, where the caller knows that the rest is empty; None is all.
    context int32 [B]: how long each row is going to be before new tokens are chosen (see `rope`); None is by this call.
    -> (hidden [B,T,D], what `write` takes: the new keys and values, and the lengths, 0 for a row that gives NaN since
    its length is outside 0..T or it would outgrow the cache).
    """
    limit = capacity(cache, config)
    fits = (lengths >= 0) & (lengths <= tokens.shape[1])
    if limit is not None:
        fits &= cache.lengths + lengths <= limit
    counts = jnp.where(fits, lengths, 0)
    real = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < counts[:, None]
    positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    context = cache.lengths + counts if context is None else jnp.maximum(context, cache.lengths + counts)
    # Padding may lie beyond a table of positions, and its NaN would spread through attention.
    x = embed(params, tokens, config, positions)
    x = jnp.where(real[:, :, None], x, jnp.zeros_like(x))
    inputs = embed_layers(params, tokens, x, config)
    x, new, _ = run_layers(params, x, positions, context, config, read_past(cache, read), inputs)
    return jnp.where(fits[:, None, None], x, jnp.full_like(x, jnp.nan)), new, counts


def with_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run under the matmul precision of the config among the arguments."""
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        config = next(a for a in (*args, *kwargs.values()) if isinstance(a, ModelConfig))
        if config.precision == "default":
            return function(*args, **kwargs)
        with jax.default_matmul_precision(config.precision):
            return function(*args, **kwargs)

    return wrapped


def forward(params: Params, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """Logits at every position, no cache. int32 [B,T] -> float32 [B,T,V].

    Raises RequestError for an id outside the vocabulary, where `tokens` is concrete (under `jit` its logits are NaN).
    """
    return _forward(params, check_tokens("forward", tokens, 2, config), config)


@functools.partial(jax.jit, static_argnames="config")
@with_precision
def _forward(params: Params, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    return lm_head(params, hidden(params, tokens, config), config)


def prefill(
    params: Params, tokens: jax.Array, cache: KVCache, config: ModelConfig, lengths: jax.Array | None = None
) -> tuple[jax.Array, KVCache]:
    """Process right-padded rows and store their keys and values; call again to go on.

    tokens int32 [B,T], true lengths int32 [B] (default T, at least 1 each) -> (float32 [B,V] at each row's last real
    position, a new cache). The argument cache stays valid. Raises RequestError for an id outside the vocabulary, a
    length outside 1..T, or a row that would outgrow the cache; under `jit`, where values cannot be read, that row's
    logits are NaN instead.
    """
    tokens = check_tokens("prefill", tokens, 2, config)
    return _prefill(params, tokens, cache, check_lengths(tokens, cache, config, lengths), config)


@functools.partial(jax.jit, static_argnames="config")
@with_precision
def _prefill(
    params: Params, tokens: jax.Array, cache: KVCache, lengths: jax.Array, config: ModelConfig
) -> tuple[jax.Array, KVCache]:
    x, cache = extend(params, tokens, cache, config, jnp.where(lengths > 0, lengths, -1))
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1, mode="clip")[:, 0]
    return lm_head(params, last, config), cache


def decode_step(
    params: Params, tokens: jax.Array, cache: KVCache, config: ModelConfig
) -> tuple[jax.Array, KVCache]:
    """Process one id per row. int32 [B] -> (float32 [B,V], a new cache). Errors as in `prefill`."""
    return prefill(params, check_tokens("decode_step", tokens, 1, config)[:, None], cache, config)


def check_tokens(where: str, tokens: Any, ndim: int, config: ModelConfig) -> jax.Array:
    """Token ids as int32; refused unless they are integers of the given rank inside the vocabulary."""
    if not isinstance(tokens, jax.Array):
        tokens = np.asarray(tokens)
    shape = "[B,T]" if ndim == 2 else "[B]"
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise JaxlmTypeError(f"{where}: tokens have dtype {tokens.dtype}; allowed: integers")
    if tokens.ndim != ndim or 0 in tokens.shape:
        raise RequestError(f"{where}: tokens have shape {tokens.shape}; allowed: {shape}, none of them 0")
    if not isinstance(tokens, jax.core.Tracer):
        values = np.asarray(tokens)
        bad = values[(values < 0) | (values >= config.vocab_size)]
        if bad.size:
            allowed = f"0 to {config.vocab_size - 1}"
            raise RequestError(f"{where}: token id {int(bad[0])} is not in the vocabulary; allowed: {allowed}")
    return jnp.asarray(tokens, jnp.int32)


def check_lengths(tokens: jax.Array, cache: KVCache, config: ModelConfig, lengths: Any) -> jax.Array:
    """True lengths int32 [B], checked against the padding and the room left in the cache where values are concrete."""
    batch, width = tokens.shape
    if lengths is not None and not jnp.issubdtype(jnp.asarray(lengths).dtype, jnp.integer):
        raise JaxlmTypeError(f"prefill: lengths have dtype {jnp.asarray(lengths).dtype}; allowed: integers")
    lengths = jnp.full((batch,), width, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    rows = cache.lengths.shape[0]
    if lengths.shape != (batch,) or rows != batch:
        raise RequestError(f"prefill: tokens have {batch} rows, lengths shape {lengths.shape}, the cache {rows} rows")
    if isinstance(lengths, jax.core.Tracer) or isinstance(cache.lengths, jax.core.Tracer):
        return lengths
    counts, limit = np.asarray(lengths), capacity(cache, config)
    if counts.min() < 1 or counts.max() > width:
        raise RequestError(f"prefill: lengths are {counts.tolist()}; allowed: 1 to {width}")
    after = np.asarray(cache.lengths) + counts
    if limit is not None and after.max() > limit:
        row, size = int(after.argmax()), int(after.max())
        raise RequestError(f"prefill: row {row} would hold {size} tokens; the cache has room for {limit}")
    return lengths
