"""The TPU that kernels are traced for: the one at hand, a named one when compiling ahead of time, or none.

The generation decides how a kernel decodes FP4. It cannot be read from the backend of a process that compiles for a
TPU which it does not have, so such a process says it: `with target(Target(generation=7)): jit(f).trace(...)`.
"""

import dataclasses
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What Pallas TPU kernels are traced for.

    Attributes:
      generation: 5 (v5e, v5p), 6 (v6e) or 7 (v7x).
      interpreted: whether kernels run as plain JAX programs, on any backend.
    """

    generation: int
    interpreted: bool = False


target = jax.make_user_context(default_value=None)
"""Context manager that sets the `Target` of what is traced inside; part of the key of `jax.jit`'s caches."""


def current() -> Target:
    """The target that was set, else the TPU at hand, else interpretation as on the newest generation."""
    if target.value is not None:
        return target.value
    if jax.default_backend() == "tpu":
        return Target(generation=pltpu.get_tpu_info().generation)
    return Target(generation=7, interpreted=True)


def interpreted() -> bool:
    """Whether Pallas TPU kernels are interpreted."""
    return current().interpreted


def left_in_hbm(stack: Any) -> Any:
    """The arrays of a stack of layers, as arguments of a kernel that reads one of them.

    XLA prefetches a kernel's arguments to VMEM where they fit: of a stack that is every layer, for each layer.
    """

    def constrained(a):
        # The constraint is one on compiled programs.
        if interpreted() or not isinstance(a, jax.core.Tracer):
            return a
        return pltpu.with_memory_space_constraint(a, pltpu.MemorySpace.HBM)

    return jax.tree.map(constrained, stack)


def backend() -> str:
    """The platform that is traced for, as `jax.default_backend()` names it."""
    if target.value is not None and not target.value.interpreted:
        return "tpu"
    return jax.default_backend()
