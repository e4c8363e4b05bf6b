"""jaxlm under measurement."""

import inspect
import resource
import time
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxlm
from benchmarks import costs, loop_state, machine, programs, shapes
from benchmarks.systems import Settings, Unable, prompt_of
from jaxlm.loop import MOST_STEPS, cache_dtype, decode_loop
from jaxlm.params import abstract_params
from jaxlm.sizes import ladder

LEARNING_RATE = 1e-5


class System:
    """A model and what is kept between two calls of an operation."""

    def __init__(self, settings: Settings):
        self.settings = settings
        shape = shapes.named(settings.model, settings.dtype)
        if shape:
            self.model = shapes.random_model(shape, settings.quantize, settings.model)
        else:
            self.model = jaxlm.load(settings.model, dtype=settings.dtype, quantize=settings.quantize)
        jax.block_until_ready(self.model.params)
        self.config = self.model.config
        self.state: tuple[Any, ...] = ()
        self.training: tuple[Any, ...] = ()

    def facts(self) -> dict[str, Any]:
        return {
            "weight_bytes": costs.nbytes(self.model.params),
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(abstract_params(self.config))),
            "max_positions": self.config.max_positions,
            "layers": len(self.config.layers),
            "backend": jax.default_backend(),
        }

    def peak(self) -> dict[str, int]:
        """The most memory so far: of the device, or of the process where the device has no own."""
        stats = jax.devices()[0].memory_stats() or {}
        process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"peak_bytes": stats.get("peak_bytes_in_use", process)}

    def prefill(self, batch: int, prompt: int) -> dict[str, float]:
        self.check_room(prompt, 1)
        rows = [prompt_of(prompt, self.config.vocab_size)] * batch
        start = time.perf_counter()
        jaxlm.generate(self.model, rows, max_new_tokens=1, ignore_eos=True)
        return {"seconds": time.perf_counter() - start}

    def check_room(self, length: int, new: int) -> None:
        if length + new > self.config.max_positions:
            raise Unable(f"{length} + {new} tokens are beyond the model's context of {self.config.max_positions}")

    def decode(self, batch: int, length: int, steps: int) -> dict[str, float]:
        self.check_room(length, steps)
        if steps > MOST_STEPS:
            raise Unable(f"{steps} steps in one call; allowed: up to {MOST_STEPS}")
        slots = ladder(length + steps)
        if not self.state or self.state[0] != (batch, slots):
            self.state = ()  # The old cache goes before a new one is made.
            settings = loop_state.settings_for(self.config, batch)
            self.state = ((batch, slots), settings, loop_state.filled(self.config, batch, length, slots))
        key, settings, state = self.state
        state = jax.block_until_ready(loop_state.again(state, length))
        start = time.perf_counter()
        state, _ = decode_loop(self.model.params, state, settings, jnp.int32(steps), self.config)
        made = int(np.asarray(state.count)[0])
        seconds = time.perf_counter() - start
        self.state = (key, settings, state)
        if made != steps:
            raise Unable(f"{made} of {steps} steps were made")
        return {"seconds": seconds}

    def train(self, batch: int, length: int) -> dict[str, float]:
        if self.settings.quantize:
            raise Unable("quantised weights have no gradient")
        optimizer = optax.adamw(LEARNING_RATE)
        if not self.training:
            # The step updates in place: the model's own weights are given up for it.
            params = self.model.params
            self.training = (training_step(self.config, optimizer), params, jax.jit(optimizer.init)(params))
        step, params, moments = self.training
        row = prompt_of(length + 1, self.config.vocab_size)
        tokens = jnp.asarray([row] * batch, jnp.int32)
        start = time.perf_counter()
        params, moments, loss = step(params, moments, tokens)
        value = float(loss)
        seconds = time.perf_counter() - start
        self.training = (step, params, moments)
        return {"seconds": seconds, "loss": value}

    def ceilings(self) -> dict[str, Any]:
        return machine.ceilings(self.settings.dtype)

    def machine(self) -> dict[str, Any]:
        return machine.description()

    def step_costs(self, batch: int, lengths: list[int]) -> list[dict[str, float]]:
        """Bytes and FLOPs of a decode step: `own` with jaxlm's weights and cache, `plain` with all in the dtype, `half`
        the bytes of a 16-bit cache alone; at each length."""
        width = np.dtype(jnp.dtype(self.settings.dtype)).itemsize
        kept = np.dtype(jnp.dtype(cache_dtype(self.config))).itemsize
        plain = abstract_params(replace(self.config, dtype=self.settings.dtype))
        return [
            {
                "own": costs.step_bytes(self.config, self.model.params, batch, n, kept),
                "plain": costs.step_bytes(self.config, plain, batch, n, width),
                "half": batch * costs.cache_bytes(self.config, n, 2),
                "flops": batch * costs.forward_flops(self.config, n, 1, 1),
            }
            for n in lengths
        ]

    def prompt_costs(self, batch: int, lengths: list[int]) -> list[dict[str, float]]:
        """FLOPs of a prefill with one row of logits, and of a training step."""
        return [
            {
                "prefill": batch * costs.forward_flops(self.config, 0, n, 1),
                "train": batch * costs.train_flops(self.config, n),
            }
            for n in lengths
        ]

    def programs(self, batch: int, prompt: int, lengths: list[int]) -> dict[str, Any]:
        return programs.describe(self.model, batch, prompt, lengths)

    def first_token(self, prompt: int) -> dict[str, Any]:
        """Seconds to the first token with what has to be compiled for it, and again without."""
        with jaxlm.compile_ledger() as ledger:
            cold = self.prefill(1, prompt)["seconds"]
        entries = [{"name": e.name, "seconds": e.seconds} for e in ledger.entries]
        return {"cold": cold, "warm": self.prefill(1, prompt)["seconds"], "programs": entries}

    def drafts(self) -> bool:
        """Whether generation can guess ahead."""
        return "draft" in inspect.signature(jaxlm.generate).parameters

    def speculate(self, ids: list[int], new: int, draft: str | None) -> dict[str, Any]:
        """Seconds of a greedy answer, with or without guesses."""
        options = {"draft": draft} if draft else {}
        start = time.perf_counter()
        made = jaxlm.generate(self.model, [ids], max_new_tokens=new, ignore_eos=True, **options)
        return {"seconds": time.perf_counter() - start, "tokens": made[0].token_ids}

    def encode(self, text: str) -> dict[str, Any]:
        if self.model.tokenizer is None:
            raise Unable("a random model has no tokenizer")
        return {"ids": self.model.tokenizer.encode(text)}


def training_step(config: jaxlm.ModelConfig, optimizer: Any) -> Any:
    """A plain step: the mean cross-entropy of every next token, its gradient, AdamW."""
    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        logits = jaxlm.forward(params, tokens[:, :-1], config)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, moments: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    return step
