"""Which implementation of an op runs, decided by platform before tracing."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to run an op.

    Attributes:
      run: the op.
      platform: where it is chosen by itself, "tpu" or "gpu"; None everywhere.
      refusal: why it does not serve given arguments of `run`, or None if it does.
    """

    run: Callable[..., Any]
    platform: str | None = None
    refusal: Callable[..., str | None] = lambda *args, **options: None


def select(
    op: str, implementation: str | None, table: Mapping[str, Implementation], *args: Any, **options: Any
) -> Callable[..., Any]:
    """The function of `table` for `implementation`; None takes the first that is for the default platform and serves.

    The choice is made before tracing: an error inside a traced call cannot be caught and retried under jit.

    Args:
      op: name of the op, for messages.
      table: implementations in order of preference.
      args, options: what the function will be called with.

    Raises:
      ValueError: a name that `op` does not have, or an implementation that does not serve these arguments.
    """
    if implementation is None:
        platform = jax.default_backend()
        for candidate in table.values():
            if candidate.platform in (None, platform) and candidate.refusal(*args, **options) is None:
                return candidate.run
        raise ValueError(
            f"{op} has no implementation for these arguments on {platform}; available: {sorted(table)}"
        )
    if implementation not in table:
        raise ValueError(
            f"{op} has no implementation {implementation!r}; available: {sorted(table)}, or None to choose"
        )
    chosen = table[implementation]
    reason = chosen.refusal(*args, **options)
    if reason is not None:
        raise ValueError(
            f"{op}: implementation {implementation!r} does not serve this: {reason}; use 'reference'"
        )
    return chosen.run


def interpreted() -> bool:
    """Whether Pallas TPU kernels are interpreted: everywhere but on a TPU."""
    return jax.default_backend() != "tpu"
