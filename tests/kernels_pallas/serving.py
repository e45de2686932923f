"""Arguments that an implementation does not serve: it says so, and names the alternative."""

import functools

import jax
import pytest


def served(op, implementation, *, jit=True):
    """`op` by one implementation, for a test body that all share: what is refused, clearly, is skipped."""
    call = functools.partial(op, implementation=implementation)
    call = jax.jit(call) if jit else call

    def run(*arguments):
        try:
            return call(*arguments)
        except ValueError as error:
            if "does not serve this" not in str(error):
                raise
            assert f"implementation {implementation!r}" in str(error) and str(error).endswith("use 'reference'")
            pytest.skip(str(error))

    return run


def refuses(table, implementation, run, arrays, *rest, **options) -> bool:
    """Whether `implementation` does not serve `run(*arrays, *rest, **options)`; then that must end in a clear error."""
    if table[implementation].refusal(*arrays, *rest, **options) is None:
        return False
    with pytest.raises(ValueError, match=rf"'{implementation}' does not serve this: .*; use 'reference'"):
        jax.eval_shape(lambda *arrays: run(*arrays, *rest, **options, implementation=implementation), *arrays)
    return True
