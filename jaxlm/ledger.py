"""A ledger of compilations: what was compiled, for which shapes, how long it took, and whether it should have been."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax

from jaxlm.errors import JaxlmError

COMPILED = "/jax/core/compile/backend_compile_duration"
LOGGER = "jax._src.interpreters.pxla"


@dataclass(frozen=True)
class Compilation:
    """One program: the function's name, JAX's line on why (the shapes it had no program for), the seconds spent."""

    name: str
    why: str
    seconds: float


@dataclass
class Ledger:
    """The compilations since the ledger was opened."""

    entries: list[Compilation] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{e.seconds:8.2f} s  {e.name}: {e.why}" for e in self.entries]
        return "\n".join(lines) or "nothing was compiled"


class _Reasons(logging.Handler):
    """Keeps JAX's last line on what it is about to compile."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("Compiling"):
            self.last = record.getMessage().split(". Argument mapping")[0]


@contextmanager
def compile_ledger(forbid: bool = False) -> Iterator[Ledger]:
    """Record every compilation of the `with` block; with forbid, raise JaxlmError after the first one instead.

    >>> with compile_ledger() as ledger:
    ...     _ = jax.jit(lambda x: x + 1)(1.0)
    >>> len(ledger.entries)
    1
    """
    ledger, reasons = Ledger(), _Reasons()
    logger = logging.getLogger(LOGGER)
    level, propagate = logger.level, logger.propagate

    def record(event: str, duration_secs: float, **facts: str | int) -> None:
        if event == COMPILED:
            entry = Compilation(str(facts.get("fun_name", "")), reasons.last, duration_secs)
            ledger.entries.append(entry)
            if forbid:
                raise JaxlmError(f"unexpected compilation of {entry.name}: {entry.why}")

    logger.addHandler(reasons)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        yield ledger
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
        logger.removeHandler(reasons)
        logger.setLevel(level)
        logger.propagate = propagate
