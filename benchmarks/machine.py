"""What this machine can do at most: read bandwidth and matrix-product rate, measured on the device that jax uses."""

import functools
import importlib
import os
import platform
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

REPEATS = 8  # Passes in one call on an accelerator, so that starting it does not count.


def ceilings(dtype: str, seconds: float = 0.3) -> dict[str, Any]:
    """read_bandwidth in bytes per second and how it was measured, matmul_rate in operations per second."""
    bandwidth, how = read_bandwidth(seconds)
    return {"read_bandwidth": bandwidth, "read_bandwidth_by": how, "matmul_rate": matmul_rate(dtype, seconds)}


def read_bandwidth(seconds: float = 0.3) -> tuple[float, str]:
    """The best rate at which the device reads memory, in bytes per second, and by what it was measured."""
    if jax.default_backend() != "cpu":
        return device_bandwidth(seconds)
    try:
        kernels = importlib.import_module("jaxlm_cpu")
    except ImportError:
        return numpy_bandwidth(seconds), "numpy threads"
    return kernels.read_bandwidth(1 << 30, seconds), "jaxlm_cpu"


def numpy_bandwidth(seconds: float, nbytes: int = 1 << 30) -> float:
    """The best rate at which all cores together read a buffer of memory."""
    data = np.ones(nbytes // 4, np.float32)
    parts = np.array_split(data, len(os.sched_getaffinity(0)))

    def read_all() -> None:
        threads = [threading.Thread(target=np.max, args=(part,)) for part in parts]  # max is vectorised: memory-bound.
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return data.nbytes / least_seconds(read_all, seconds)


def device_bandwidth(seconds: float, nbytes: int = 2 << 30) -> tuple[float, str]:
    """The better of a sum, which reads, and a copy, which reads and writes."""
    data = jnp.ones((nbytes // 4,), jnp.float32)

    @jax.jit
    def sums(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, REPEATS, lambda _, total: jnp.sum(x + 0 * total), jnp.float32(0))

    @functools.partial(jax.jit, donate_argnums=0)
    def copies(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, REPEATS, lambda _, x: x + 1, x)

    holder = [data]

    def copy() -> None:
        holder[0] = copies(holder[0])
        holder[0].block_until_ready()

    summing = least_seconds(lambda: sums(data).block_until_ready(), seconds / 2)
    copying = least_seconds(copy, seconds / 2)  # Gives `data` away: last.
    rates = {"a sum on the device": nbytes / summing, "a copy on the device": 2 * nbytes / copying}
    best = max(rates, key=lambda name: rates[name])
    return REPEATS * rates[best], best


def matmul_rate(dtype: str, seconds: float = 0.3) -> float:
    """The best rate, in operations per second, of square matrix products that sum in float32."""
    return product_rate(dtype, seconds, *((2048, 1) if jax.default_backend() == "cpu" else (8192, REPEATS)))


def product_rate(dtype: str, seconds: float, size: int, repeats: int) -> float:
    """The same for one size, with so many products in a call."""
    a = jnp.full((size, size), 1 / size, dtype)

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum("ij,kj->ik", x, y, preferred_element_type=jnp.float32)

    @jax.jit
    def products(x: jax.Array, y: jax.Array) -> jax.Array:
        x = jax.lax.fori_loop(0, repeats - 1, lambda _, x: product(x, y).astype(dtype), x)
        return product(x, y)

    return 2.0 * repeats * size**3 / least_seconds(lambda: products(a, a).block_until_ready(), seconds)


def least_seconds(call: Callable[[], Any], seconds: float) -> float:
    """The fastest of as many calls as fit in that time, after one that does not count."""
    call()
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline or best == float("inf"):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def description() -> dict[str, Any]:
    """Machine and versions, to be kept with every figure."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    device = jax.devices()[0]
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "backend": jax.default_backend(),
        "device": model if device.platform == "cpu" else device.device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "load": os.getloadavg()[0],
    }
