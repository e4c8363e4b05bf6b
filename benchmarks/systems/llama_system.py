"""llama.cpp under measurement, through its Python module. It reads GGUF files, one row at a time."""

import os
import resource
import time
from typing import Any

import llama_cpp

from benchmarks import shapes
from benchmarks.systems import Settings, Unable, prompt_of
from jaxlm.checkpoints import resolve

MOST_PREFILLED = 4096  # A longer context would take too long to fill.


class System:
    """A GGUF file with all cores, and all layers on the GPU where there is one and the build knows it."""

    def __init__(self, settings: Settings):
        if shapes.named(settings.model, settings.dtype):
            raise Unable("a random model has no GGUF file")
        path = resolve(settings.model)
        if path.suffix != ".gguf":
            raise Unable(f"{path} is no GGUF file")
        threads = len(os.sched_getaffinity(0))
        room = min(settings.room, MOST_PREFILLED) + 8
        self.path = path
        self.model = llama_cpp.Llama(
            str(path), n_ctx=room, n_threads=threads, n_threads_batch=threads, n_batch=512, n_gpu_layers=-1,
            verbose=False,
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        return {"weight_bytes": self.path.stat().st_size, "llama_cpp": llama_cpp.__version__}

    def peak(self) -> dict[str, int]:
        return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}

    def prefill(self, batch: int, prompt: int) -> dict[str, float]:
        return {"seconds": self.answer(batch, prompt, 1)[0]}

    def decode(self, batch: int, length: int, steps: int) -> dict[str, float]:
        return {"seconds": self.answer(batch, length, steps + 1)[1]}

    def answer(self, batch: int, prompt: int, new: int) -> tuple[float, float]:
        """Seconds to the first new token, and for the others."""
        if batch > 1:
            raise Unable("one row at a time")
        if prompt + new > self.model.n_ctx():
            raise Unable(f"not measured beyond {MOST_PREFILLED} tokens")
        self.model.reset()
        start = time.perf_counter()
        made = self.model.generate(prompt_of(prompt, self.model.n_vocab()), temp=0.0)
        next(made)
        first = time.perf_counter()
        for _ in range(new - 1):
            next(made)
        return first - start, time.perf_counter() - first

    def first_token(self, prompt: int) -> dict[str, Any]:
        times = [self.prefill(1, prompt)["seconds"] for _ in range(2)]
        return {"cold": times[0], "warm": times[1], "programs": []}
