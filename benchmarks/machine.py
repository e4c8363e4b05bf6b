"""What this machine can do at most: read bandwidth and matrix-product rate, measured."""

import os
import platform
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def read_bandwidth(nbytes: int = 1 << 30, seconds: float = 1.0) -> float:
    """The best rate, in bytes per second, at which all cores together read a buffer of memory."""
    data = np.ones(nbytes // 4, np.float32)
    parts = np.array_split(data, len(os.sched_getaffinity(0)))
    best, deadline = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        threads = [threading.Thread(target=np.max, args=(part,)) for part in parts]  # max is vectorised: memory-bound.
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, data.nbytes / (time.perf_counter() - start))
    return best


def matmul_rate(dtype: str, size: int = 2048, seconds: float = 1.0) -> float:
    """The best rate, in operations per second, of a square matrix product that sums in float32."""
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda x, y: jnp.einsum("ij,kj->ik", x, y, preferred_element_type=jnp.float32))
    product(a, a).block_until_ready()
    best, deadline = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        product(a, a).block_until_ready()
        best = max(best, 2.0 * size**3 / (time.perf_counter() - start))
    return best


def description() -> dict[str, Any]:
    """Machine and versions, to be kept with every figure."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "backend": jax.default_backend(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "load": os.getloadavg()[0],
    }
