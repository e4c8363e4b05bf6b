"""Choosing the next id: repetition penalty, temperature, top-k, top-p, min-p, then a draw; or the largest logit.

The filters apply in that order, each to what the one before left. All settings may differ by row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.errors import JaxlmTypeError, RequestError

REFUSED = -1  # What `sample` returns for a row that has no valid choice.


def sample(
    logits: jax.Array,
    key: jax.Array,
    *,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
) -> jax.Array:
    """One id per row. float [B,V] -> int32 [B].

    key: one key, from which each row derives its own by its index, or one key per row [B].
    Each setting is a number or one per row: temperature 0 takes the largest logit; top_k 0 is off; top_p 1 is off, else
    the fewest ids whose probabilities sum to it (Holtzman et al. 2019); min_p 0 is off, else a share of the largest
    probability. Ids that tie with the last one kept are kept too; at least one id always is.
    A row with a NaN, a +inf or no finite logit gives -1. Raises RequestError for a setting out of range, if concrete.
    """
    if logits.ndim != 2 or 0 in logits.shape:
        raise RequestError(f"logits have shape {logits.shape}; allowed: [B,V], neither of them 0")
    check_settings(temperature, top_k, top_p, min_p, rows=logits.shape[0])
    if not isinstance(top_k, jax.core.Tracer):
        top_k = np.minimum(top_k, logits.shape[1])
    return _sample(logits, key, temperature, top_k, top_p, min_p)


@jax.jit
def _sample(logits: jax.Array, key: jax.Array, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> jax.Array:
    batch = logits.shape[0]
    keys = row_keys(key, batch) if key.ndim == (0 if _is_typed(key) else 1) else key
    settings = [jnp.broadcast_to(jnp.asarray(s, t), (batch,)) for s, t in (
        (temperature, jnp.float32), (top_k, jnp.int32), (top_p, jnp.float32), (min_p, jnp.float32))]  # fmt: skip
    logits = logits.astype(jnp.float32)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jax.lax.cond(jnp.any(settings[0] > 0), _draw, lambda *_: greedy, logits, keys, *settings)
    return jnp.where(choosable(logits), jnp.where(settings[0] > 0, drawn, greedy), REFUSED)


def choosable(logits: jax.Array) -> jax.Array:
    """Whether each row has no NaN, no +inf and at least one finite logit. [B,V] -> bool [B]."""
    highest = jnp.max(logits, axis=-1)
    return jnp.isfinite(highest) & ~jnp.any(jnp.isnan(logits), axis=-1)


def row_keys(key: jax.Array, batch: int) -> jax.Array:
    """A key per row: row i's depends on `key` and i alone."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch, dtype=jnp.uint32))


def penalise_repeats(logits: jax.Array, seen: jax.Array, penalty: jax.Array) -> jax.Array:
    """Divide the positive and multiply the negative logits of ids already seen (Keskar et al. 2019), once per id.

    logits [B,V], seen bool [B,V], penalty [B]; 1 is off.
    """
    penalty = penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_logits(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """Logits over temperature, with -inf for the ids that top-k, top-p or min-p drop. [B,V], settings [B]."""
    # The largest logit is subtracted first, so that a tiny temperature gives 0 and -inf, never NaN.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = shifted / jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)[:, None]
    scaled = jax.lax.cond(jnp.any(top_k > 0), _keep_top_k, lambda x, _: x, scaled, top_k)
    scaled = jax.lax.cond(jnp.any(top_p < 1), _keep_top_p, lambda x, _: x, scaled, top_p)
    return jnp.where(jnp.exp(scaled) >= jnp.minimum(min_p, 1.0)[:, None], scaled, -jnp.inf)


def _draw(logits: jax.Array, keys: jax.Array, *settings: jax.Array) -> jax.Array:
    """A draw by the Gumbel-max trick, each row with its own key."""
    kept = filter_logits(logits, *settings)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
    return jnp.argmax(kept + noise, axis=-1).astype(jnp.int32)


def _keep_top_k(scaled: jax.Array, top_k: jax.Array) -> jax.Array:
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, scaled.shape[1]), scaled.shape[1]).astype(jnp.float32)
    return _keep_heaviest(scaled, jnp.ones_like(scaled), wanted)


def _keep_top_p(scaled: jax.Array, top_p: jax.Array) -> jax.Array:
    least = jnp.finfo(jnp.float32).tiny
    wanted = jnp.where(top_p < 1, jnp.maximum(top_p, least), jnp.inf)  # No set weighs inf: all are kept.
    return _keep_heaviest(scaled, jax.nn.softmax(scaled, axis=-1), wanted)


def _keep_heaviest(scaled: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """Keep the fewest of the largest logits whose weights sum to at least `wanted` [B], ties included.

    The smallest kept logit is found bit by bit on an order-preserving integer image of the floats: 32 sums over the
    vocabulary, where a sort of it would take several times as long.
    """
    bits = jax.lax.bitcast_convert_type(scaled, jnp.int32)
    ordered = jnp.where(bits < 0, ~bits, bits ^ jnp.int32(-(2**31))).view(jnp.uint32)

    def try_bit(i: jax.Array, least: jax.Array) -> jax.Array:
        candidate = least | (jnp.uint32(1) << (jnp.uint32(31) - i.astype(jnp.uint32)))
        weight = jnp.sum(jnp.where(ordered >= candidate[:, None], weights, 0.0), axis=-1)
        return jnp.where(weight >= wanted, candidate, least)

    least = jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(scaled.shape[:1], jnp.uint32))
    return jnp.where(ordered >= least[:, None], scaled, -jnp.inf)


def check_settings(
    temperature: Any = 0.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    repetition_penalty: Any = 1.0,
    rows: int | None = None,
) -> dict[str, Any]:
    """The settings as arrays, by name.

    Raises RequestError for the first one out of range, or that is neither one number nor one for each of `rows`.
    Traced values cannot be read and pass.
    """
    rules = (
        ("temperature", temperature, lambda v: np.isfinite(v) & (v >= 0), "finite numbers of at least 0"),
        ("top_k", top_k, lambda v: np.isfinite(v) & (v == np.floor(v)) & (v >= 0), "integers of at least 0 (0 is off)"),
        ("top_p", top_p, lambda v: (v > 0) & (v <= 1), "numbers above 0 and up to 1 (1 is off)"),
        ("min_p", min_p, lambda v: (v >= 0) & (v <= 1), "numbers from 0 (off) to 1"),
        ("repetition_penalty", repetition_penalty, lambda v: np.isfinite(v) & (v > 0), "finite numbers above 0"),
    )
    return {name: check_setting(name, value, rule, allowed, rows) for name, value, rule, allowed in rules}


def check_setting(name: str, value: Any, rule: Callable[[Any], Any], allowed: str, rows: int | None) -> Any:
    """One setting as an array; refused unless every number in it keeps the rule and there are as many as allowed."""
    array = value if isinstance(value, jax.core.Tracer) else as_array(name, value)
    if rows is not None and array.shape not in ((), (rows,)):
        raise RequestError(f"{name} has shape {array.shape}; allowed: one number, or one for each row ({rows})")
    if isinstance(array, jax.core.Tracer):
        return array
    numeric = array.dtype.kind in "iuf" and array.ndim <= 1
    if not numeric or not np.all(rule(array.astype(np.float64))):
        shown = " ".join(repr(value).split())
        raise RequestError(f"{name} is {shown if len(shown) <= 80 else shown[:77] + '...'}; allowed: {allowed}")
    return array


def as_array(name: str, value: Any) -> np.ndarray:
    """numpy's reading of a value; refused if it has none."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        raise JaxlmTypeError(f"{name} is {value!r}; allowed: a number or a flat list of numbers") from None


def _is_typed(key: jax.Array) -> bool:
    return jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
