"""Arguments that an implementation does not serve: it says so, and names the alternative."""

import jax
import pytest


def refuses(table, implementation, run, arrays, *rest, **options) -> bool:
    """Whether `implementation` does not serve `run(*arrays, *rest, **options)`; then that must end in a clear error."""
    if table[implementation].refusal(*arrays, *rest, **options) is None:
        return False
    with pytest.raises(ValueError, match=rf"'{implementation}' does not serve this: .*; use 'reference'"):
        jax.eval_shape(lambda *arrays: run(*arrays, *rest, **options, implementation=implementation), *arrays)
    return True
