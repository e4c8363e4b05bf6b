"""Laws of the whole model: the numbers are right, and every route to them gives the same ones."""

import oracle
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=25)
@given(tiny.configs(), st.integers(0, 2**31))
def test_logits_equal_the_float64_model_at_every_position(config, seed):
    params, tokens = tiny.random_params(config, seed), tiny.random_tokens((2, 8), seed, config.vocab_size)
    found = tiny.forward(params, tokens, config)
    assert found.dtype == "float32"
    assert tiny.relative_error(found, oracle.forward(params, tokens, config)) < 1e-4
