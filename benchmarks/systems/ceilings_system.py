"""The machine itself, in a process of its own, so that the probe's memory counts for no system's peak."""

from typing import Any

from benchmarks import machine
from benchmarks.systems import Settings


class System:
    """Nothing is loaded."""

    def __init__(self, settings: Settings):
        self.settings = settings

    def facts(self) -> dict[str, Any]:
        return {}

    def ceilings(self) -> dict[str, Any]:
        return machine.ceilings(self.settings.dtype)
