"""Speed of the CPU kernels beside XLA's own products and this machine's read bandwidth, measured in one run.

    python kernels/bench.py [--gigabytes 1.2] [--width 4096] [--repeats 5] [--batches 1 2 4 8] [--only f32 bf16 ...]

Each product is a scan over a stack of [width, width] matrices larger than the cache, the output feeding the next step.
GB/s counts each stored byte (values, scales, mins) once. Prints a table and, last, one JSON line. On a machine shared
with others, JAXLM_CPU_THREADS=1 with --cpu-time measures one core by the processor time it used, not by the clock.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import jaxlm_cpu as kernels
import numpy as np


def stack(block: np.ndarray, layers: int, dtype=None) -> jax.Array:
    """One random matrix `layers` times over: real memory without the time to draw it."""
    return jnp.asarray(np.broadcast_to(block, (layers, *block.shape)), dtype)


def make_weights(kind: str, width: int, size: float):
    """A stack of about `size` bytes, as an array, Q8 or Q4, and its exact size."""
    rng = np.random.default_rng(0)
    per_value = {"f32": 4, "bf16": 2, "f16": 2, "q8": 1 + 2 / 32, "q4": 0.5 + 4 / 32}[kind]
    layers = max(2, round(size / (per_value * width * width)))
    scales = stack(rng.uniform(0.5, 1.5, (width, width // 32)).astype(np.float16) / (16 * width**0.5), layers)
    if kind == "q8":
        w = kernels.Q8(stack(rng.integers(-127, 128, (width, width), dtype=np.int8), layers), scales)
    elif kind == "q4":
        w = kernels.Q4(stack(rng.integers(0, 256, (width, width // 2), dtype=np.uint8), layers), scales, scales * -7)
    else:
        dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}[kind]
        w = stack(rng.normal(size=(width, width)).astype(np.float32) / width**0.5, layers, dtype)
    return w, layers


@partial(jax.jit, static_argnums=(2, 3))
def through_stack(x: jax.Array, w, product: Callable, layers: int) -> jax.Array:
    """x through every matrix of the stack in turn; the stack is invariant, the layer an index."""

    def body(x, i):
        return jnp.tanh(product(x, w, i)), None

    return jax.lax.scan(body, x, jnp.arange(layers, dtype=jnp.int32))[0]


def xla_product(x: jax.Array, w: jax.Array, i: jax.Array) -> jax.Array:
    w = jax.lax.dynamic_index_in_dim(w, i, keepdims=False)
    return jnp.einsum("bk,nk->bn", x.astype(w.dtype), w, preferred_element_type=jnp.float32)


@partial(jax.jit, static_argnums=2)
def xla_unrolled(x: jax.Array, ws: list[jax.Array], _: int) -> jax.Array:
    for w in ws:
        x = jnp.tanh(jnp.einsum("bk,nk->bn", x.astype(w.dtype), w, preferred_element_type=jnp.float32))
    return x


CLOCK = [time.perf_counter]


def seconds(call: Callable[[], jax.Array]) -> float:
    start = CLOCK[0]()
    call().block_until_ready()
    return CLOCK[0]() - start


def compare(calls: dict[str, Callable[[], jax.Array]], repeats: int) -> dict[str, list[float]]:
    """Times of each call, taken in turns after one warm-up each."""
    for call in calls.values():
        call().block_until_ready()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return times


def products(kind: str) -> dict[str, Callable]:
    if kind == "q8":
        return {"exact": kernels.matvec_q8, "int8": partial(kernels.matvec_q8, int8=True)}
    if kind == "q4":
        return {"exact": kernels.matvec_q4, "int8": partial(kernels.matvec_q4, int8=True)}
    return {"exact": kernels.matvec, "xla scan": xla_product}


def bench_kind(kind: str, args: argparse.Namespace) -> list[dict]:
    w, layers = make_weights(kind, args.width, args.gigabytes * 1e9)
    size = sum(a.nbytes for a in jax.tree.leaves(w))
    per_layer = [jnp.array(a) for a in w] if kind in ("f32", "bf16") and args.unrolled else None
    rows = []
    for batch in args.batches:
        x = jnp.asarray(np.random.default_rng(1).normal(size=(batch, args.width)), jnp.float32)
        calls = {name: partial(through_stack, x, w, f, layers) for name, f in products(kind).items()}
        if per_layer is not None:
            calls["xla unrolled"] = partial(xla_unrolled, x, per_layer, layers)
        for name, times in compare(calls, args.repeats).items():
            best, median = (size / t / 1e9 for t in (min(times), statistics.median(times)))
            rows.append({"weights": kind, "batch": batch, "path": name, "best": best, "median": median})
            print(f"{kind:5} B={batch:<3} {name:14} {best:7.1f} best {median:7.1f} median GB/s", flush=True)
    return rows


def no_product(x: jax.Array, w: jax.Array, i: jax.Array) -> jax.Array:
    return x + i


def one_product(x: jax.Array, w: jax.Array, i: jax.Array) -> jax.Array:
    return kernels.matvec(x, w, i * 0)


def three_products(x: jax.Array, w: jax.Array, i: jax.Array) -> jax.Array:
    return sum(kernels.matvec(x, [w, w, w], i * 0))


def bench_overhead(repeats: int) -> list[dict]:
    """Microseconds per step of a scan of 1000 small products, against the same scan without any."""
    rows = []
    steps = 1000
    for width in (64, 576):
        w = jnp.asarray(np.random.default_rng(0).normal(size=(1, width, width)) / width**0.5, jnp.bfloat16)
        x = jnp.ones((1, width), jnp.float32)
        kinds = {"no product": no_product, "1 product": one_product, "3 in one call": three_products}
        calls = {name: partial(through_stack, x, w, f, steps) for name, f in kinds.items()}
        for name, times in compare(calls, 4 * repeats).items():
            best, median = (1e6 * t / steps for t in (min(times), statistics.median(times)))
            rows.append({"width": width, "step": name, "best_us": best, "median_us": median})
            print(f"width {width:4} {name:14} {best:7.2f} best {median:7.2f} median us per step", flush=True)
    return rows


def bench_attention(args: argparse.Namespace) -> list[dict]:
    """One layer's attention for each of 32 stacked layers (H=32, K=8, h=128), caches full to `length`."""
    rows = []
    layers, length, heads, keys, width = 32, 4096, 32, 8, 128
    for dtype in (jnp.float32, jnp.bfloat16):
        block = np.random.default_rng(0).normal(size=(1, length, keys, width)).astype(np.float32)
        cache = stack(block, layers, dtype)
        q, new = jnp.ones((1, 1, heads, width)), jnp.ones((1, 1, keys, width))
        lengths = jnp.array([length], jnp.int32)

        @jax.jit
        def run(q, cache, new=new, lengths=lengths):
            body = lambda q, i: (kernels.attention(q, new, new, cache, cache, lengths, i), None)  # noqa: E731
            return jax.lax.scan(body, q, jnp.arange(layers, dtype=jnp.int32))[0]

        times = compare({"attention": partial(run, q, cache)}, args.repeats)["attention"]
        best, median = (2 * cache.nbytes / t / 1e9 for t in (min(times), statistics.median(times)))
        rows.append({"cache": jnp.dtype(dtype).name, "best": best, "median": median})
        print(f"attention {rows[-1]['cache']:9} {length} slots {best:7.1f} best {median:7.1f} median GB/s", flush=True)
    return rows


def bench_many_rows(args: argparse.Namespace) -> list[dict]:
    """512 rows of bfloat16 through a stack, and 512 queries with their 512 keys; GFLOP/s, XLA's beside."""
    w, layers = make_weights("bf16", args.width, args.gigabytes * 1e9)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(512, args.width)), jnp.bfloat16)

    def product(x: jax.Array, w: jax.Array, i: jax.Array) -> jax.Array:
        return kernels.matvec(x, w, i, dtype=jnp.bfloat16 if kernels.matrix_unit() else jnp.float32)

    def xla(x: jax.Array, w: jax.Array, i: jax.Array) -> jax.Array:
        w, i = jax.lax.optimization_barrier((w, i))  # Or the stack would be widened as a whole, ahead of the loop.
        return xla_product(x, w, i).astype(x.dtype)

    calls = {name: partial(through_stack, x, w, f, layers) for name, f in (("kernels", product), ("xla", xla))}
    work = dict.fromkeys(calls, 2.0 * 512 * w.size)
    q, new = jnp.ones((1, 512, 32, 128), jnp.bfloat16), jnp.ones((1, 512, 8, 128), jnp.bfloat16)
    nothing, lengths = jnp.zeros((1, 0, 8, 128)), jnp.zeros((1,), jnp.int32)
    calls["attention"] = jax.jit(lambda: kernels.attention(q, new, new, nothing, nothing, lengths))
    calls["xla attention"] = jax.jit(lambda: jax.nn.dot_product_attention(q, new, new, is_causal=True))
    work |= dict.fromkeys(("attention", "xla attention"), 4.0 * 32 * 128 * 512 * 512 / 2)
    rows = []
    for name, times in compare(calls, args.repeats).items():
        best, median = (work[name] / t / 1e9 for t in (min(times), statistics.median(times)))
        rows.append({"what": name, "best": best, "median": median})
        print(f"512 rows {name:14} {best:7.0f} best {median:7.0f} median GFLOP/s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--only", nargs="+", default=["f32", "bf16", "q8", "q4", "overhead", "attention", "many"])
    parser.add_argument("--unrolled", action="store_true", help="also XLA with one array per layer (twice the memory)")
    parser.add_argument("--cpu-time", action="store_true", help="processor time instead of the clock")
    args = parser.parse_args()
    if args.cpu_time:
        CLOCK[0] = time.process_time
    result = {"isa": kernels.isa(), "threads": kernels.threads(), "machine": platform.machine(), "jax": jax.__version__}
    result["read_bandwidth_before"] = kernels.read_bandwidth() / 1e9
    print(f"{result['isa']}, {result['threads']} threads, read bandwidth {result['read_bandwidth_before']:.1f} GB/s")
    kinds = [kind for kind in args.only if kind in ("f32", "bf16", "f16", "q8", "q4")]
    result["products"] = [row for kind in kinds for row in bench_kind(kind, args)]
    result["overhead"] = bench_overhead(args.repeats) if "overhead" in args.only else []
    result["attention"] = bench_attention(args) if "attention" in args.only else []
    result["many_rows"] = bench_many_rows(args) if "many" in args.only else []
    result["read_bandwidth_after"] = kernels.read_bandwidth() / 1e9
    print(f"read bandwidth {result['read_bandwidth_after']:.1f} GB/s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
