"""Times fused attention against the plain formula on whatever backend is here: python -m benchmarks.attention

A row a shape: prefill of T tokens alone, or one token after a context of S. On a CPU the fused side is the optional
kernels. Ratios above 1 say that the fused side is faster; the last line is JSON.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.attention import Past, Shared, attend_plainly, attend_seen
from jaxlm.cache import KV, slot_positions
from jaxlm.config import AttentionSpec
from jaxlm.quant import Layer

LAYERS = 4  # Of the stack that the cache is: one is read, as in a scan.


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    for name, default in (("heads", 32), ("kv-heads", 8), ("width", 128), ("batch", 1), ("window", 0), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048], metavar="T")
    parser.add_argument("--decode", type=int, nargs="*", default=[512, 2048, 8192], metavar="S")
    args = parser.parse_args()
    spec = AttentionSpec(args.heads, args.kv_heads, args.width, window=args.window)
    shapes = [("prefill", tokens, 0) for tokens in args.prefill] + [("decode", 1, context) for context in args.decode]
    rows = [measure(kind, tokens, context, spec, args) for kind, tokens, context in shapes]
    print(json.dumps({"device": jax.devices()[0].device_kind, "jax": jax.__version__, **vars(args), "rows": rows}))


def measure(kind: str, tokens: int, context: int, spec: AttentionSpec, args: argparse.Namespace) -> dict[str, Any]:
    """Medians of both sides, taking turns."""
    given = make(tokens, context, spec, args.batch, args.dtype)
    fused = jax.jit(functools.partial(attend_seen, spec))
    plain = jax.jit(functools.partial(attend_plainly, spec))
    error = float(jnp.max(jnp.abs(fused(*given).astype(jnp.float32) - plain(*given).astype(jnp.float32))))
    times: dict[str, list[float]] = {"fused": [], "plain": []}
    for _ in range(args.rounds):
        for name, function in (("fused", fused), ("plain", plain)):
            times[name].append(seconds(function, given))
    row = {name: statistics.median(values) for name, values in times.items()}
    ratio, size = row["plain"] / row["fused"], tokens if kind == "prefill" else context
    fast, slow = (f"{name} {row[name] * 1e6:9.0f} us" for name in ("fused", "plain"))
    print(f"{kind:8} {size:6}  {fast}  {slow}  ratio {ratio:5.2f}  largest difference {error:.1e}")
    return {"kind": kind, "size": size, "ratio": ratio, "error": error, **row}


def make(tokens: int, context: int, spec: AttentionSpec, batch: int, dtype: str) -> tuple[Any, ...]:
    """q, positions, what is seen and no sinks; the cache has twice the slots that are used, the most it ever has."""
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def draw(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.dtype(dtype))

    heads, used = (spec.num_kv_heads, spec.head_dim), jnp.full((batch,), context, jnp.int32)
    positions = used[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :]
    slots = min(2 * context, spec.window) if spec.window else 2 * context
    stack = [Layer(draw(LAYERS, batch, slots, *heads), jnp.int32(1)) for _ in range(2)] if context else None
    past = Past(KV(*stack), slot_positions(used, slots)) if stack else None
    new = KV(draw(batch, tokens, *heads), draw(batch, tokens, *heads))
    return draw(batch, tokens, spec.num_heads, spec.head_dim), positions, Shared(past, new), None


def seconds(function: Callable[..., jax.Array], given: tuple[Any, ...], least: float = 0.05) -> float:
    """Per call, of as many calls as take `least` seconds."""
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < least:
        function(*given).block_until_ready()
        calls += 1
    return (time.perf_counter() - start) / calls


if __name__ == "__main__":
    main()
