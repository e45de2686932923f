"""Which implementation of an op runs, decided before tracing."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to run an op.

    Attributes:
      run: the op.
      refusal: why it does not serve given arguments of `run`, or None if it does.
    """

    run: Callable[..., Any]
    refusal: Callable[..., str | None] = lambda *args, **options: None


def select(
    op: str, implementation: str | None, table: Mapping[str, Implementation], *args: Any, **options: Any
) -> Callable[..., Any]:
    """The function of `table` for `implementation`; None takes the reference.

    The choice is made before tracing: an error inside a traced call cannot be caught and retried under jit.

    Args:
      op: name of the op, for messages.
      table: implementations by name.
      args, options: what the function will be called with.

    Raises:
      ValueError: a name that `op` does not have, or an implementation that does not serve these arguments.
    """
    name = "reference" if implementation is None else implementation
    if name not in table:
        raise ValueError(
            f"{op} has no implementation {name!r}; available: {sorted(table)}, or None to choose"
        )
    chosen = table[name]
    reason = chosen.refusal(*args, **options)
    if reason is not None:
        raise ValueError(f"{op}: implementation {name!r} does not serve this: {reason}; use 'reference'")
    return chosen.run


def interpreted() -> bool:
    """Whether Pallas TPU kernels are interpreted: everywhere but on a TPU."""
    return jax.default_backend() != "tpu"
