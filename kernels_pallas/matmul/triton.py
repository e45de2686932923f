"""Matmul with FP4 weights, or a layer of a BF16 stack, on NVIDIA GPUs: the grouped kernel with one group."""

import functools
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas import formats, triton_bridge
from kernels_pallas.arrays import Fp4Array, Stacked
from kernels_pallas.formats import MXFP4, NVFP4
from kernels_pallas.gradients import with_gradient_of
from kernels_pallas.implementations import empty_refusal
from kernels_pallas.matmul import reference
from kernels_pallas.matmul.reference import row_scale
from kernels_pallas.quantize.reference import operand
from kernels_pallas.tiled import TiledFp4Array, tile
from kernels_pallas.tiled_matmul import decoded, launch, tiled_weights
from kernels_pallas.triton_bridge import CompileCase

DISPATCH = json.loads((pathlib.Path(__file__).parent / "dispatch.json").read_text())
"""By device kind: the number of rows from which weights are decoded once, for the library's GEMM.

Measured on an H200 (`experiments.bench_kernels --match "decoded in the kernel"`): the kernel is 1.8 times as fast at
256 rows, 1.04 times at 2048, the most that was measured.
"""
MAX_STACK_ROWS = 256
"""Rows up to which a layer of a BF16 stack is multiplied where it lies; for more, cutting it out is little work.

So a row's bits may be others in a batch of more rows, which are the library's: these products are not invariant there.
"""


def refusal(x: Any, w: Any, *, mode: str) -> str | None:
    """Why this kernel does not serve these arguments, None if it does."""
    if isinstance(w, Stacked):
        return _stack_refusal(x, w)
    if not isinstance(w, Fp4Array | TiledFp4Array):
        return "w is not FP4; the library's GEMM serves arrays"
    if not isinstance(x, Fp4Array) and x.dtype != jnp.bfloat16:
        return f"it multiplies bfloat16 and FP4, x is {x.dtype}"
    if isinstance(w, Fp4Array) and w.row_exponent.ndim:
        return "w has row scales of its columns, not one of the matrix"
    return empty_refusal(x, w) or triton_bridge.unavailable()


def _stack_refusal(x: Any, w: Stacked) -> str | None:
    for name, a in (("x", x), ("the stack", w.array)):
        if isinstance(a, Fp4Array) or a.dtype != jnp.bfloat16:
            return f"it multiplies rows and layers of a stack in bfloat16, {name} is not"
    k, n = w.shape
    if n % 16 or k % 8:
        return f"BF16 matrices of {k} x {n} are not multiples of 8 x 16"
    rows = math.prod(x.shape[:-1])
    if rows > MAX_STACK_ROWS:
        return f"{rows} rows of a layer of a stack exceed its {MAX_STACK_ROWS}"
    return empty_refusal(x, w) or triton_bridge.unavailable()


@with_gradient_of(reference.matmul)
def matmul(
    x: Float[Array, "... k"] | Fp4Array, w: Fp4Array | TiledFp4Array | Stacked, *, mode: str
) -> Float[Array, "... n"]:
    """See `api.matmul`. An Fp4Array is tiled first: do that once, where weights are synchronised."""
    if isinstance(w, Fp4Array):
        w = tile(w)
    lead = x.shape[:-1]
    x = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(lead) :]), x)
    return _rows(x, w, mode).reshape(*lead, w.shape[-1])


def _rows(x: Float[Array, "m k"] | Fp4Array, w: TiledFp4Array | Stacked, mode: str) -> Float[Array, "m n"]:
    library = DISPATCH.get(jax.devices()[0].device_kind, DISPATCH["default"])
    if mode == "fast" and x.shape[0] >= library and not isinstance(w, Stacked):
        return decoded_once(x, w)
    return decoded_in_kernel(x, w, mode)


def decoded_in_kernel(
    x: Float[Array, "m k"] | Fp4Array, w: TiledFp4Array | Stacked, mode: str = "fast"
) -> Float[Array, "m n"]:
    """The kernel, whatever the number of rows."""
    rows = x.shape[0]
    if isinstance(w, Stacked):
        one, size = Stacked(w.array[:, None], w.layer), w.shape
    else:
        one, size = jax.tree.map(lambda leaf: leaf[None], w), w.padded
    split, columns = _split(*size, rows if mode == "fast" else 1)
    parts = launch(x, one, jnp.full((1,), rows, jnp.int32), split=split, columns=columns)
    # One after the other: XLA's reduction orders a sum by the number of rows.
    return functools.reduce(jnp.add, [parts[i] for i in range(split)])


def _split(k: int, n: int, rows: int) -> tuple[int, int]:
    """Parts of K and columns of a tile: programs for several waves, of at least 1024 values of K each."""
    if rows > 64:
        return 1, 128
    columns = 128 if n >= 8192 else 64
    split = 1
    while (
        split < 4 and k // (2 * split) >= 1024 and k % (2 * split * 128) == 0 and split * n // columns < 640
    ):
        split *= 2
    return split, columns


def decoded_once(x: Float[Array, "m k"] | Fp4Array, w: TiledFp4Array) -> Float[Array, "m n"]:
    """Weights decoded to BF16, then the library's GEMM."""
    x_scale, left = row_scale(x), operand(x) if isinstance(x, Fp4Array) else x
    k, n = w.size
    out = jnp.einsum("mk,nk->mn", left, decoded(w)[:n, :k], preferred_element_type=jnp.float32)
    if x_scale is not None:
        out = out * x_scale[:, None]
    return out * formats.row_scale(w.row_exponent)


def compile_cases() -> Iterator[CompileCase]:
    """One row to a prompt's, and weights decoded for the library."""
    for format in (NVFP4, MXFP4):
        w = jax.eval_shape(
            functools.partial(tiled_weights, format, False),
            jax.ShapeDtypeStruct((8192, 28672), jnp.bfloat16),
        )
        for rows in (1, 64, 256):
            x = jax.ShapeDtypeStruct((rows, 8192), jnp.bfloat16)
            run = functools.partial(matmul, mode="invariant")
            # 256 columns of accumulators and decoded weights: a few registers too many on Blackwell.
            yield CompileCase(
                f"matmul_{format.name}_{rows}", run, (x, w), local_bytes=64 if rows == 256 else 0
            )
        yield CompileCase(f"operand_{format.name}", decoded, (w,))
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    for rows, k, n in ((64, 2048, 4096), (256, 4096, 2048), (16, 2880, 512)):
        stack = Stacked(jax.ShapeDtypeStruct((48, k, n), jnp.bfloat16), layer)
        x = jax.ShapeDtypeStruct((rows, k), jnp.bfloat16)
        yield CompileCase(
            f"matmul_layer_{rows}x{k}x{n}", functools.partial(matmul, mode="invariant"), (x, stack)
        )
