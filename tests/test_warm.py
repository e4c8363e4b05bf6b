"""Warm-up compiles all that generation needs, and the ledger tells what was compiled."""

import logging
import random

import jax
import pytest

import jaxlm
from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig
from jaxlm.errors import JaxlmError, RequestError
from jaxlm.ledger import LOGGER
from jaxlm.params import init_params
from jaxlm.sizes import warm_shapes


@pytest.fixture(scope="module")
def model() -> jaxlm.Model:
    config = ModelConfig(32, 16, (LayerSpec(AttentionSpec(2, 1, 8), FFNSpec(32)),), max_positions=4096)
    return jaxlm.Model(config, init_params(config, jax.random.key(0)))


def test_nothing_compiles_after_warm_up(model: jaxlm.Model) -> None:
    said: list[str] = []
    jaxlm.warmup(model, max_len=512, say=said.append)
    assert said == [f"compiling for {slots} tokens of context" for slots in (256, 512, 1024)]
    chance = random.Random(0)
    with jaxlm.compile_ledger(forbid=True) as ledger:
        for length in (1, 3, 17, 100, 128, 129, 300, 384, 385, 510):
            prompt = [chance.randrange(32) for _ in range(length)]
            new = chance.randrange(1, 512 - length)
            choice = {"temperature": chance.random(), "top_k": chance.randrange(4), "seed": chance.randrange(99)}
            assert len(jaxlm.generate(model, [prompt], max_new_tokens=new, **choice)[0].token_ids) == new
            jaxlm.generate(model, [prompt], max_new_tokens=2, top_p=0.5, min_p=0.1, repetition_penalty=1.5)
    assert ledger.entries == [] and str(ledger) == "nothing was compiled"


def test_sizes_cover_every_prompt() -> None:
    shapes = warm_shapes(1100)
    assert set(shapes) == {256, 512, 1024, 2048}
    assert (512, 0) in shapes[1024] and (16, 512) in shapes[1024]


def test_the_ledger_names_function_and_shapes() -> None:
    logger = logging.getLogger(LOGGER)
    before = (logger.level, logger.propagate, list(logger.handlers))

    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    run = jax.jit(doubled)
    with jaxlm.compile_ledger() as ledger:
        run(jax.numpy.zeros((3, 5)))
        run(jax.numpy.ones((3, 5)))
    mine = [entry for entry in ledger.entries if "doubled" in entry.name]
    assert len(mine) == 1 and "float32[3,5]" in mine[0].why and mine[0].seconds > 0
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    run(jax.numpy.zeros((7,)))
    assert len([entry for entry in ledger.entries if "doubled" in entry.name]) == 1  # It was closed.


def test_an_unexpected_compilation_raises() -> None:
    with pytest.raises(JaxlmError, match="unexpected compilation of"), jaxlm.compile_ledger(forbid=True):
        def tripled(x: jax.Array) -> jax.Array:
            return x * 3

        jax.jit(tripled)(1.0)


@pytest.mark.parametrize("bad", [{"batch": 0}, {"max_len": 1}, {"max_len": 5000}, {"batch": 1.5}])
def test_bad_sizes_are_refused(model: jaxlm.Model, bad: dict) -> None:
    with pytest.raises(RequestError, match=next(iter(bad))):
        jaxlm.warmup(model, **bad)
