"""The systems that are measured, each behind the same operations, and each in a process of its own (worker.py).

A module here defines `System(settings)`, which loads, and whose methods are the operations that it has:

    facts()                        sizes and versions
    prefill(batch, prompt)         seconds to the first new token
    decode(batch, length, steps)   seconds of so many further ones on rows that hold `length` tokens already
    train(batch, length)           seconds of one training step
"""

from typing import Any, NamedTuple

# Name -> (module with `System`, module that must be installed, what to pass on).
SYSTEMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "jaxlm": ("benchmarks.systems.jaxlm_system", "jax", {}),
    "transformers": ("benchmarks.systems.torch_system", "transformers", {"compiled": False}),
    "torch-compile": ("benchmarks.systems.torch_system", "transformers", {"compiled": True}),
    "llama-cpp": ("benchmarks.systems.llama_system", "llama_cpp", {}),
    "ceilings": ("benchmarks.systems.ceilings_system", "jax", {}),
}
PEERS = ("transformers", "torch-compile", "llama-cpp")


class Settings(NamedTuple):
    """What a system is asked to load, and the most tokens that a row will hold."""

    model: str
    dtype: str
    quantize: str | None
    room: int


class Unable(Exception):
    """This system has no such operation, or not at this size: its row is left out and the reason told."""


def prompt_of(length: int, vocab: int) -> list[int]:
    """Ids that any vocabulary has; what they say does not change the work."""
    return [5 + i * 7919 % 900 % (vocab - 5) for i in range(length)]
