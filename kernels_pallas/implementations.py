"""Which implementation of an op runs, decided by platform before tracing."""

from collections.abc import Callable, Mapping


def select(op: str, implementation: str | None, table: Mapping[str, Callable]) -> Callable:
    """The function in `table` for `implementation`; None takes the best one for the default platform.

    The choice is made before tracing: an error inside a traced call cannot be caught and retried under jit.
    ValueError for a name that `op` does not have, with the names it has.
    """
    name = "reference" if implementation is None else implementation
    if name not in table:
        raise ValueError(
            f"{op} has no implementation {name!r}; available: {sorted(table)}, or None to choose"
        )
    return table[name]
