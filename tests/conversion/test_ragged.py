"""Rows of different lengths, prefilled together in pieces and decoded together, give what each gives alone."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import cases, reference, relative_error, write_case
from family_checks import logits_at_once
from foreign import save_folder

from jaxlm import decode_step, init_cache, prefill
from jaxlm.conversion import load_source

# Rings of a window and of a chunk, latents with YaRN, growing queries, divisors chosen per row.
MODELS = [
    ("gpt_oss", "windows"), ("llama4", "chunks"), ("deepseek_v2", "yarn_groups"), ("mistral4", "grown"),
    ("ministral3", "grown_window"), ("phi3", "long"),
]  # fmt: skip
STEPS = 7


@pytest.mark.parametrize(("family", "name"), MODELS)
def test_rows_as_alone(family: str, name: str, tmp_path: Path) -> None:
    case = next(c for c in cases(family) if c.name == name)
    loaded = load_source(write_case(tmp_path, family, case))
    tokens = np.random.default_rng(5).integers(0, case.config["vocab_size"], (3, 24)).astype(np.int32)
    pieces = np.array([[4, 3, 7], [8, 1, 8]])
    ends = pieces.sum(axis=0)
    cache = init_cache(loaded.config, 3, 24)
    fill = jax.jit(prefill, static_argnums=3)
    starts = np.zeros(3, int)
    for counts in pieces:
        rows = np.stack([np.resize(t[s : s + c], 8) for t, s, c in zip(tokens, starts, counts, strict=True)])
        logits, cache = fill(loaded.params, jnp.asarray(rows), cache, loaded.config, jnp.asarray(counts, jnp.int32))
        starts = starts + counts
    alone = [logits_at_once(loaded.params, tokens[i : i + 1], loaded.config) for i in range(3)]
    step = jax.jit(decode_step, static_argnums=3)
    for n in range(STEPS):
        expected = np.stack([a[end - 1 + n] for a, end in zip(alone, ends, strict=True)])
        assert relative_error(np.asarray(logits), expected) < case.tolerance
        following = np.array([t[end + n] for t, end in zip(tokens, ends, strict=True)], np.int32)
        logits, cache = step(loaded.params, jnp.asarray(following), cache, loaded.config)


def test_each_row_chooses_its_own_divisors(tmp_path: Path) -> None:
    """One row within the original length of a LongRoPE model, one beyond it."""
    case = next(c for c in cases("phi3") if c.name == "long")
    config, shapes, _ = reference("phi3", case)
    original = {"original_max_position_embeddings": 8}
    config = config | original | {"rope_parameters": config["rope_parameters"] | original}
    loaded = load_source(save_folder(tmp_path, config, case.tensors(shapes)))
    tokens, lengths = np.repeat(case.tokens()[:, :20], 2, axis=0), np.array([8, 20])
    cache = init_cache(loaded.config, 2, 20)
    together, _ = prefill(loaded.params, jnp.asarray(tokens), cache, loaded.config, jnp.asarray(lengths, jnp.int32))
    short, long = (logits_at_once(loaded.params, tokens[:1, :n], loaded.config) for n in lengths)
    assert relative_error(np.asarray(together), np.stack([short[-1], long[-1]])) < case.tolerance
    assert relative_error(long[:8], short) > 0.01
