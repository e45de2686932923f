"""Which implementation of an op runs, decided before tracing."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType

from kernels_pallas.target import backend


class NotServedError(ValueError):
    """An implementation that was asked for by name does not serve the arguments; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to run an op.

    Attributes:
      run: the op.
      refusal: why it does not serve given arguments of `run`, or None if it does. It may say that something is
        missing on this machine; arguments may be shapes and dtypes only.
      platform: "tpu" or "gpu" as `jax.default_backend()` names it, where it is chosen by itself; None: anywhere.
      deference: why it is not chosen by itself for arguments that it serves, or None if it is.
    """

    run: Callable[..., Any]
    refusal: Callable[..., str | None] = lambda *args, **options: None
    platform: str | None = None
    deference: Callable[..., str | None] = lambda *args, **options: None


default_implementation = jax.make_user_context(default_value=None)
"""Context manager: what is called inside uses the implementation of this name wherever a caller leaves the choice open;
None chooses. Part of the key of `jax.jit`'s caches. `default_implementation("reference")` is for comparisons.
"""


def empty_refusal(*arrays: Any) -> str | None:
    """What a kernel says of arguments without elements, for which it would have no programs; None if all have some."""
    return next((f"shape {tuple(a.shape)} is empty" for a in arrays if 0 in a.shape), None)


def select(
    op: str, implementation: str | None, table: Mapping[str, Implementation], *args: Any, **options: Any
) -> Callable[..., Any]:
    """The function of `table` for `implementation`; None takes the first that `explain` has nothing against.

    The choice is made before tracing: an error inside a traced call cannot be caught and retried under jit. A name
    is taken at its word: on another platform than its own it is only refused if it says so itself (Pallas TPU kernels
    run interpreted there).

    Args:
      op: name of the op, for messages.
      table: implementations by name, best first; the last one, "reference", serves everything.
      args, options: what the function will be called with.

    Raises:
      ValueError: a name that `op` does not have.
      NotServedError: an implementation that does not serve these arguments.
    """
    implementation = default_implementation.value if implementation is None else implementation
    if implementation is None:
        against = explain(table, *args, **options)
        return table[next(name for name, reason in against.items() if reason is None)].run
    if implementation not in table:
        raise ValueError(
            f"{op} has no implementation {implementation!r}; available: {sorted(table)}, or None to choose"
        )
    chosen = table[implementation]
    reason = chosen.refusal(*args, **options)
    if reason is not None:
        raise NotServedError(
            f"{op}: implementation {implementation!r} does not serve this: {reason}; use 'reference'"
        )
    return chosen.run


def explain(table: Mapping[str, Implementation], *args: Any, **options: Any) -> dict[str, str | None]:
    """Per implementation, in the table's order, why it would not be chosen for a call; None if nothing is against it.

    The first None is the one that `select` takes. `args` and `options` are those of `select`; shapes and dtypes
    (`jax.ShapeDtypeStruct`) do.
    """
    partitioned = "XLA cannot partition its kernel over this mesh" if _is_partitioned() else None

    def against(entry: Implementation) -> str | None:
        if entry.platform is None:
            return entry.refusal(*args, **options)
        if entry.platform != backend():
            return f"it is for {entry.platform}, the default backend is {backend()}"
        return partitioned or entry.refusal(*args, **options) or entry.deference(*args, **options)

    return {name: against(entry) for name, entry in table.items()}


def chooses_kernels(platform: str) -> bool:
    """Whether programs traced now take kernels of `platform` where a caller leaves the choice open."""
    return default_implementation.value is None and backend() == platform and not _is_partitioned()


def _is_partitioned() -> bool:
    """Whether XLA cuts the program over devices: a mesh of several is set and not every axis is manual."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return False
    return any(kind != AxisType.Manual for kind in mesh.axis_types)
