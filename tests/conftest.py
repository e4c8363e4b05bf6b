"""Strict settings for the whole run: what would only warn or be guessed elsewhere is an error here."""

import os
from collections.abc import Iterator

# Before jax starts: eight pretended CPU devices, so that sharding can be tested anywhere.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_captured_constants_warn_bytes", 100_000)

# The default run is the same every time and reports the first failure as found, since each new shape compiles for a
# second; HYPOTHESIS_PROFILE=explore looks for new examples and shrinks them.
quick = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=20, derandomize=True, database=None, phases=quick
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=100, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True, scope="module")
def _forget_programs() -> Iterator[None]:
    """Each compiled program takes some of the memory maps that a process may have (65,530 on Linux)."""
    yield
    jax.clear_caches()


def pytest_configure(config: pytest.Config) -> None:
    for rule in ("error:::jaxlm", "error:Some donated buffers", "error:.*large amount of constants"):
        config.addinivalue_line("filterwarnings", rule)
