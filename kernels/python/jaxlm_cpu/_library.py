"""Finds the compiled library, registers its handlers with XLA and calls its plain entry points."""

import ctypes
import importlib.util

import jax

TARGETS = ("jaxlm_cpu_matvec", "jaxlm_cpu_matvec_quant", "jaxlm_cpu_attention", "jaxlm_cpu_write")


def _load() -> ctypes.CDLL:
    spec = importlib.util.find_spec("jaxlm_cpu._kernels")
    if spec is None or spec.origin is None:
        raise ImportError("jaxlm_cpu is installed without its compiled kernels: install it again with a C++ compiler")
    library = ctypes.CDLL(spec.origin)
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    library.jaxlm_cpu_isa.restype = ctypes.c_char_p
    library.jaxlm_cpu_threads.restype = ctypes.c_int
    library.jaxlm_cpu_matrix_unit.restype = ctypes.c_int
    library.jaxlm_cpu_read_bandwidth.restype = ctypes.c_double
    library.jaxlm_cpu_read_bandwidth.argtypes = [ctypes.c_int64, ctypes.c_double]
    return library


_LIBRARY = _load()


def isa() -> str:
    """The instruction set in use: "portable", "avx2", "avx512" or "avx512_vnni"."""
    return _LIBRARY.jaxlm_cpu_isa().decode()


def matrix_unit() -> bool:
    """Whether products of many bfloat16 rows have a matrix unit (AMX) here; without, they are slower than XLA's."""
    return bool(_LIBRARY.jaxlm_cpu_matrix_unit())


def threads() -> int:
    """Threads that share a call: the cores this process may use, at most the environment's JAXLM_CPU_THREADS."""
    return _LIBRARY.jaxlm_cpu_threads()


def read_bandwidth(size: int = 2 << 30, seconds: float = 0.5) -> float:
    """Best rate at which all threads read a fresh buffer, in bytes per second.

    `size` (bytes, 1 MiB to 63 GiB) should be several times the last-level cache; passes repeat for `seconds`.
    Raises ValueError for a size out of range and MemoryError if the buffer is not to be had.
    """
    if not 1 << 20 <= size <= 63 << 30:
        raise ValueError(f"size must be between 1 MiB and 63 GiB, got {size}")
    rate = _LIBRARY.jaxlm_cpu_read_bandwidth(size, seconds)
    if rate == 0:
        raise MemoryError(f"no buffer of {size} bytes for the bandwidth probe")
    return rate
