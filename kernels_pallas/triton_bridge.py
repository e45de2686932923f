"""Triton kernels in JAX: whether they can run here, and the call. Loads triton and jax_triton, which are optional,
only to run a kernel.
"""

import functools
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.backend import get_backend

REQUIRED = {"triton": ((3, 6), (3, 7)), "jax-triton": ((0, 3, 1), (0, 4))}
"""Distributions, the oldest release of each that the kernels are written for, and the first that is too new."""


class CompileCase(NamedTuple):
    """A call that a test compiles without a GPU; the `compile_cases` of a `triton` module cover its kernels.

    Attributes:
      name: of the case.
      run: called with `arguments`, shapes and dtypes, it makes one call of a kernel.
      local_bytes: of memory that a thread may use for registers that do not fit.
    """

    name: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    local_bytes: int = 0


def unavailable() -> str | None:
    """What Triton kernels lack on this machine, None if they can run: what every Triton `refusal` asks first."""
    platform = jax.default_backend()
    if platform != "gpu":
        return f"it needs an NVIDIA GPU, the default backend is {platform}"
    if "rocm" in get_backend().platform_version.lower():
        return "it needs an NVIDIA GPU, this one is AMD's"
    for distribution, (oldest, newer) in REQUIRED.items():
        bounds = (".".join(map(str, bound)) for bound in (oldest, newer))
        wanted = "it needs {} >= {}, < {}".format(distribution, *bounds)
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return f"{wanted}, which is not installed"
        if not oldest <= _release(version) < newer:
            return f"{wanted}, installed is {version}"
    return None


def call(
    kernel: Any,
    *arguments: jax.Array | int,
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int = 3,
    aliases: Mapping[int, int] | None = None,
    **constants: Any,
) -> list[jax.Array]:
    """Call a Triton kernel: pointers to `arguments` (numbers as they are), then to `outputs`, then `constants`.

    Products and sums are not contracted, so that they round as written. Neither vmap nor differentiation is defined.

    Args:
      kernel: the `triton.jit` function.
      outputs: shapes and dtypes of the results.
      grid: programs along up to three axes.
      aliases: from the index of an array argument, numbers not counted, to that of the output that takes its buffer.
      constants: the kernel's `constexpr` parameters.
    """
    import jax_triton

    _call_by_typed_interface()
    return jax_triton.triton_call(
        *arguments,
        kernel=kernel,
        out_shape=list(outputs),
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        input_output_aliases=dict(aliases or {}),
        enable_fp_fusion=False,
        name=kernel.fn.__name__,
        **constants,
    )


@functools.cache
def _call_by_typed_interface() -> None:
    """Lowers `jax_triton`'s calls to XLA's typed custom calls: only those does XLA record into CUDA graphs.

    By the untyped ones, which jax_triton 0.3.1 emits, every call costs the host a launch of its own.
    """
    from jax.interpreters import mlir
    from jax_triton import triton_lib
    from jaxlib.mlir import ir

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        results = triton_lib.triton_kernel_call_lowering(
            triton_lib.get_cuda_backend, ctx, *operands, **params
        )
        attributes = results[0].owner.attributes
        attributes["backend_config"] = ir.DictAttr.get({"opaque": attributes["backend_config"]})
        attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4)
        attributes["call_target_name"] = ir.StringAttr.get("triton_kernel_call_ffi")
        return results

    mlir.register_lowering(triton_lib.triton_kernel_call_p, lower, platform="cuda")


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (3, 6, 0) of "3.6.0+cu128"."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
