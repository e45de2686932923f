"""Settings of every test: CPU unless JAX_PLATFORMS says otherwise, no rank promotion, seeds by name."""

import os

# Before JAX is imported: a visible accelerator must not change what the core suite measures.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import zlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
# Nearly all of the suite's time is LLVM optimising programs that then run once: without it the suite is several times
# faster. Set in this process and not by XLA_FLAGS, which child processes and notebooks would inherit: they run the code
# fully optimised, as users do, and one of them is conformance. JAX_DISABLE_MOST_OPTIMIZATIONS=0 optimises here, too.
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    jax.config.update("jax_disable_most_optimizations", True)
# The same examples in every run, and no time limit for one: machines are shared.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

# Every compiled program keeps memory mappings, of which Linux gives a process 65530 unless told otherwise.
MANY_MAPPINGS = 16_000


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_programs() -> Iterator[None]:
    """Frees what earlier files compiled, where it has become much."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MANY_MAPPINGS:
        jax.clear_caches()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of 32 bits derived from the test's own id: stable between runs, different between tests."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def key(seed: int) -> jax.Array:
    return jax.random.key(seed)
