"""transformers under measurement: eager, or with decoding (a static cache) and training through torch.compile.

Prompts run eager in both, as transformers itself does it.
"""

import inspect
import os
import resource
import time
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from benchmarks import shapes
from benchmarks.systems import Settings, Unable, prompt_of

LEARNING_RATE = 1e-5


class System:
    """A model on the CPU, or on the first GPU where torch has one and jax is not told to stay on the CPU."""

    def __init__(self, settings: Settings, compiled: bool):
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        gpu = torch.cuda.is_available() and os.environ.get("JAX_PLATFORMS") != "cpu"
        self.device = "cuda" if gpu else "cpu"
        self.model = load(settings, self.device)
        self.settings, self.compiled = settings, compiled
        parameters = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.step = torch.compile(self.next_token, dynamic=False) if compiled else self.next_token
        self.caches: dict[tuple[int, ...], Any] = {}
        self.training: tuple[Any, ...] = ()

    def facts(self) -> dict[str, Any]:
        return {"weight_bytes": sum(p.nbytes for p in self.model.parameters()), "torch": torch.__version__}

    def peak(self) -> dict[str, int]:
        if self.device == "cuda":
            return {"peak_bytes": torch.cuda.max_memory_allocated()}
        return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}

    def tokens(self, batch: int, length: int) -> Any:
        return torch.tensor([prompt_of(length, self.model.config.vocab_size)] * batch, device=self.device)

    def now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def next_token(self, tokens: Any, cache: Any) -> Any:
        """[B,T] -> [B,1]: the likeliest next id of each row."""
        cached = {self.cache_name: cache}
        logits = self.model(tokens, use_cache=True, logits_to_keep=1, **cached).logits
        return logits[:, -1:].argmax(-1)

    @torch.no_grad()
    def prefill(self, batch: int, prompt: int) -> dict[str, float]:
        tokens = self.tokens(batch, prompt)
        start = self.now()
        self.next_token(tokens, DynamicCache(config=self.model.config))
        return {"seconds": self.now() - start}

    @torch.no_grad()
    def decode(self, batch: int, length: int, steps: int) -> dict[str, float]:
        cache = self.static_cache(batch, length + steps) if self.compiled else DynamicCache(config=self.model.config)
        cache.reset()
        self.fill(cache, batch, length)
        token = self.tokens(batch, 1)
        start = self.now()
        for _ in range(steps):
            token = self.step(token, cache).clone()
        return {"seconds": self.now() - start}

    def static_cache(self, batch: int, length: int) -> Any:
        """One of these sizes is kept: the compiled step holds on to where it lies."""
        if (batch, length) not in self.caches:
            self.caches = {(batch, length): StaticCache(config=self.model.config, max_cache_len=length)}
        return self.caches[batch, length]

    def fill(self, cache: Any, batch: int, length: int) -> None:
        """Keys and values of `length` tokens in every layer."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for layer in range(config.num_hidden_layers):
            values = torch.full((batch, heads, length, width), 0.01, dtype=self.model.dtype, device=self.device)
            cache.update(values, values.clone(), layer)

    def train(self, batch: int, length: int) -> dict[str, float]:
        if not self.training:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=1e-4)
            self.training = (torch.compile(self.loss) if self.compiled else self.loss, optimizer)
        loss_of, optimizer = self.training
        tokens = self.tokens(batch, length + 1)
        start = self.now()
        loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = float(loss.detach())
        return {"seconds": self.now() - start, "loss": value}

    def loss(self, tokens: Any) -> Any:
        """The mean cross-entropy of every next token."""
        logits = self.model(tokens[:, :-1], use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def first_token(self, prompt: int) -> dict[str, Any]:
        times = [self.prefill(1, prompt)["seconds"] for _ in range(2)]
        return {"cold": times[0], "warm": times[1], "programs": []}

    def speculate(self, ids: list[int], new: int, draft: str | None) -> dict[str, Any]:
        """Greedy, with guesses looked up in the prompt or without."""
        if self.compiled:
            raise Unable("guesses are measured with eager transformers")
        tokens = torch.tensor([ids], device=self.device)
        start = self.now()
        made = self.model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            pad_token_id=0, **({"prompt_lookup_num_tokens": 10} if draft else {}),
        )  # fmt: skip
        return {"seconds": self.now() - start, "tokens": made[0, len(ids) :].tolist()}


def load(settings: Settings, device: str) -> Any:
    """A checkpoint, or the same random shape."""
    dtype = getattr(torch, settings.dtype)
    shape = shapes.named(settings.model, settings.dtype)
    if shape is None:
        from jaxlm.checkpoints import resolve

        path = resolve(settings.model)
        place = {"pretrained_model_name_or_path": path} if path.is_dir() else {
            "pretrained_model_name_or_path": path.parent, "gguf_file": path.name}  # fmt: skip
        return AutoModelForCausalLM.from_pretrained(**place, dtype=dtype).to(device).eval()
    if not shape.family:
        raise Unable(f"{settings.model} has no published code of the same shape")
    from jaxlm.conversion import families
    from jaxlm.conversion.family import described

    family = families.by_model_type(shape.family)
    fields = described(family, shape.config)
    config = AutoConfig.for_model(**fields)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
