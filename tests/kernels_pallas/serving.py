"""Arguments that an implementation does not serve: it says so, and names the alternative."""

import functools
import re
from collections.abc import Callable

import jax
import pytest

from kernels_pallas import triton_bridge


def refuses(table, implementation, run, arrays, *rest, **options) -> bool:
    """Whether `implementation` does not serve `run(*arrays, *rest, **options)`; then that must end in a clear error."""
    if table[implementation].refusal(*arrays, *rest, **options) is None:
        return False
    with pytest.raises(ValueError, match=rf"'{implementation}' does not serve this: .*; use 'reference'"):
        jax.eval_shape(lambda *arrays: run(*arrays, *rest, **options, implementation=implementation), *arrays)
    return True


def served(implementation: str, run: Callable) -> Callable:
    """`run`, which uses `implementation`; a call that it refuses with a clear error skips the test."""

    @functools.wraps(run)
    def call(*args, **options):
        try:
            return run(*args, **options)
        except ValueError as error:
            clear = re.search(
                rf"implementation '{implementation}' does not serve this: .+; use 'reference'", str(error)
            )
            if not clear or implementation == "reference":
                raise
            _skip(clear.group())

    return call


def skip_where_refused(table, implementation, run, arrays, *rest, **options) -> None:
    """Skips the test where `refuses` says so: for implementations that this machine lacks something for."""
    if refuses(table, implementation, run, arrays, *rest, **options):
        _skip(table[implementation].refusal(*arrays, *rest, **options))


def _skip(reason: str) -> None:
    """Skips, but fails on a GPU that nothing could run on: a suite of skips must not pass there."""
    if jax.default_backend() == "gpu" and triton_bridge.unavailable() is not None:
        pytest.fail(f"no kernel runs on this GPU: {triton_bridge.unavailable()}")
    pytest.skip(reason)
