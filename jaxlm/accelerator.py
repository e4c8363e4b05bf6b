"""The seam to fused attention on a GPU or TPU: which kernel serves a call, or None where the plain formula does.

None has run on its hardware yet: they are compiled for it and compared with the plain formula on a CPU, in interpret
mode or through XLA. `python -m benchmarks.attention` times what serves against the plain formula. Set JAXLM_KERNELS=0
to leave all of it off.
"""

import importlib
import os
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.cache import KV
from jaxlm.config import AttentionSpec
from jaxlm.quant import Layer, cut

HALVES = ("bfloat16", "float16")
SPLASH_STEP = 128  # Splash attention takes whole multiples of this many tokens.


def platform() -> str:
    """"gpu", "tpu", or "" where nothing is to be done for either."""
    off = os.environ.get("JAXLM_KERNELS", "1") == "0"
    return jax.default_backend() if not off and jax.default_backend() in ("gpu", "tpu") else ""


def backend() -> str:
    """"gpu", "tpu", or "" where no kernel is to be used: XLA cannot split a Mosaic kernel over several devices."""
    return "" if platform() == "tpu" and jax.device_count() > 1 else platform()


def serves(on: str, q: jax.Array, seen: Any, spec: AttentionSpec, sinks: jax.Array | None) -> bool:
    """Whether the backend's kernel can do a call. q [B,T,H,h]; seen: `jaxlm.attention.Shared`.

    | backend | call | kernel | where |
    | --- | --- | --- | --- |
    | gpu | new tokens alone | cuDNN, causal, in a window or masked to chunks | the line below this table |
    | gpu | one token after a past | cuDNN over the used slots | the same |
    | gpu | several tokens after a past | cuDNN with a mask | the same |
    | tpu | one token after a past | `tpu.decode_attention`, over the used slots | float32 or bfloat16, no alibi |
    | tpu | new tokens alone | splash attention | the same, no chunks, T a multiple of 128 |
    | tpu | several tokens after a past | splash attention of each part | the same, no window, S a multiple of 128 |
    | other | any | none | |

    cuDNN: CUDA, bfloat16 or float16, h a multiple of 8 up to 128 (up to 256 from compute capability 9.0), no softcap,
    sinks, alibi or latent. Where nothing serves, XLA reads all slots of the cache, which `jaxlm.loop` keeps to at most
    twice the used ones by doubling it.
    """
    tokens, past = q.shape[1], past_of(seen)
    if spec.alibi or (past is None and tokens == 1):
        return False
    # With one token the slots are taken for all that the layer has, around which a ring turns.
    if tokens == 1 and stack_of(past.kv)[0].k.shape[2] != past.positions.shape[1]:
        return False
    if on == "gpu":
        highest = importlib.import_module("jaxlm.gpu").capability()
        width = 256 if highest >= (9, 0) else 128 if highest >= (8, 0) else 0
        fits = q.dtype.name in HALVES and q.shape[3] % 8 == 0 and q.shape[3] <= width
        return fits and not spec.softcap and sinks is None and seen.new.v is not None
    if on != "tpu" or q.dtype.name not in ("float32", "bfloat16"):
        return False
    if tokens == 1:
        return True
    if spec.chunk or tokens % SPLASH_STEP or seen.new.v is None:
        return False
    return past is None or (not spec.window and past.positions.shape[1] % SPLASH_STEP == 0)


def alone(
    q: jax.Array, positions: jax.Array, seen: Any, spec: AttentionSpec, sinks: jax.Array | None
) -> jax.Array | None:
    """New tokens without a past or sinks, [B,T,H,h]; or None. These kernels have gradients of their own."""
    if q.shape[1] == 1 or past_of(seen) is not None or sinks is not None:
        return None
    return attention(q, positions, seen, spec, sinks)


def attention(
    q: jax.Array, positions: jax.Array, seen: Any, spec: AttentionSpec, sinks: jax.Array | None
) -> jax.Array | None:
    """Attention to a past and new tokens by a kernel, [B,T,H,h] in q's dtype; or None. It may have no gradient."""
    on, past = backend(), past_of(seen)
    if not on or not serves(on, q, seen, spec, sinks):
        return None
    module = importlib.import_module(f"jaxlm.{on}")
    if on == "tpu" and q.shape[1] == 1:
        new = jax.tree.map(lambda a: a[:, 0], seen.new)
        stack, layer = stack_of(past.kv)
        return module.decode_attention(q[:, 0], new, stack, layer, positions[:, 0], spec, sinks)[:, None]
    past = cut_past(past)
    if on == "tpu":
        return module.prefill_attention(q, seen.new, past, spec, sinks)
    return module.attention(q, positions, seen.new, past, spec)


def stack_of(kv: KV) -> tuple[KV, jax.Array]:
    """A layer's stack [R,B,S,K,h] and its number there; a layer that has been cut out is a stack of one."""
    if isinstance(kv.k, Layer):
        return jax.tree.map(lambda a: a.stack, kv, is_leaf=lambda a: isinstance(a, Layer)), kv.k.number
    return jax.tree.map(lambda a: a[None], kv), jnp.int32(0)


def past_of(seen: Any) -> Any:
    """The past, None where there is none or it has no slots to look at."""
    return None if seen.past is None or seen.past.positions.shape[1] == 0 else seen.past


def cut_past(past: Any) -> Any:
    """A past whose keys and values are arrays of just the slots to look at."""
    if past is None:
        return None
    slots = past.positions.shape[1]
    kv = jax.tree.map(lambda a: cut(a)[:, :slots], past.kv, is_leaf=lambda a: isinstance(a, Layer))
    return past._replace(kv=kv)


def stacked(tokens: int) -> bool:
    """Whether a call of so many tokens a row should leave its cache in the stack for a kernel."""
    return tokens == 1 and backend() == "tpu"
