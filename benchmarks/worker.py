"""One system under measurement, in a process of its own: requests come as JSON lines, answers go back the same way.

A process each keeps their peak memory apart, and lets the parent take turns between them while all stay loaded.
"""

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[list[list[int]], int], None]  # Answer prompts (ids) with so many new tokens each.


def jaxlm(model: str, dtype: str, quantize: str | None) -> tuple[Run, dict[str, Any]]:
    import jax

    import jaxlm as system
    from jaxlm.cache import init_cache
    from jaxlm.quant import is_weight

    loaded = system.load(model, dtype=dtype, quantize=quantize)
    read = dict(loaded.params)
    if not loaded.config.tie_embeddings:
        read.pop("embed")  # A step reads one row of it.
    cache = jax.eval_shape(lambda: init_cache(loaded.config, 1, 1024))

    def run(prompts: list[list[int]], new: int) -> None:
        system.generate(loaded, prompts, max_new_tokens=new, ignore_eos=True)

    facts = {
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(read)),
        "cache_bytes_per_token": sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(cache.layers)) / 1024,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(read, is_leaf=is_weight) if not is_weight(leaf)),
        "vocab_size": loaded.config.vocab_size,
    }
    return run, facts


def transformers(model: str, dtype: str, quantize: str | None) -> tuple[Run, dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from jaxlm.checkpoints import resolve

    disable_progress_bar()
    path = resolve(model)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    place = {"pretrained_model_name_or_path": path} if path.is_dir() else {
        "pretrained_model_name_or_path": path.parent, "gguf_file": path.name}  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(**place, dtype=getattr(torch, dtype)).eval()

    def run(prompts: list[list[int]], new: int) -> None:
        with torch.inference_mode():
            loaded.generate(
                torch.tensor(prompts), attention_mask=torch.ones(len(prompts), len(prompts[0])), max_new_tokens=new,
                min_new_tokens=new, do_sample=False, pad_token_id=0,
            )  # fmt: skip

    return run, {"weight_bytes": sum(p.nbytes for p in loaded.parameters())}


def llama_cpp(model: str, dtype: str, quantize: str | None) -> tuple[Run, dict[str, Any]]:
    import llama_cpp

    from jaxlm.checkpoints import resolve

    threads = len(os.sched_getaffinity(0))
    path = resolve(model)
    loaded = llama_cpp.Llama(
        str(path), n_ctx=2048, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False
    )

    def run(prompts: list[list[int]], new: int) -> None:
        for prompt in prompts:
            loaded.reset()
            for count, _ in enumerate(loaded.generate(prompt, temp=0.0, reset=True), 1):
                if count == new:
                    break

    return run, {"weight_bytes": path.stat().st_size}


SYSTEMS = {"jaxlm": jaxlm, "transformers": transformers, "llama-cpp": llama_cpp}


def serve(name: str, model: str, dtype: str, quantize: str | None) -> None:
    """Load, then answer {"prompts": ids, "new": n} with {"seconds": s} until stdin ends; first and last, facts."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with contextlib.redirect_stdout(sys.stderr):
        start = time.perf_counter()
        run, facts = SYSTEMS[name](model, dtype, quantize)
        print(json.dumps(facts | {"load_seconds": time.perf_counter() - start}), file=answers)
        for line in sys.stdin:
            request = json.loads(line)
            start = time.perf_counter()
            run(request["prompts"], request["new"])
            seconds = time.perf_counter() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps({"seconds": seconds, "peak_bytes": peak}), file=answers)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] or None)
