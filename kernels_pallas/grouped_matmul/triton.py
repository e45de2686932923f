"""Grouped matmul on NVIDIA GPUs: FP4 weights are decoded in registers, on the way to the tensor cores.

The kernel is in `triton_matmul`.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kernels_pallas import triton_bridge
from kernels_pallas.activations import Activation
from kernels_pallas.arrays import Fp4Array, Stacked
from kernels_pallas.formats import MXFP4, NVFP4
from kernels_pallas.gradients import with_gradient_of
from kernels_pallas.grouped_matmul import reference
from kernels_pallas.grouped_matmul.shapes import GPT_OSS
from kernels_pallas.implementations import empty_refusal
from kernels_pallas.tiled import TiledFp4Array, tile
from kernels_pallas.tiled_matmul import launch, tiled_weights
from kernels_pallas.triton_bridge import CompileCase

MAX_GROUPS = 1023


def refusal(
    x: Any,
    w: Any,
    group_sizes: jax.Array | jax.ShapeDtypeStruct,
    bias: jax.Array | jax.ShapeDtypeStruct | None = None,
    *,
    activation: Activation | None = None,
) -> str | None:
    """Why this kernel does not serve these arguments, None if it does."""
    matrices = w.array if isinstance(w, Stacked) else w
    for name, a in (("x", x), ("w", matrices)):
        if not isinstance(a, Fp4Array | TiledFp4Array) and a.dtype != jnp.bfloat16:
            return f"it multiplies bfloat16 and FP4, {name} is {a.dtype}"
    experts, k, n = w.shape
    if experts > MAX_GROUPS:
        return f"{experts} groups exceed its {MAX_GROUPS}"
    if isinstance(matrices, TiledFp4Array):
        if matrices.gated != (activation is not None):
            return f"w is tiled with gated={matrices.gated}, the activation is {activation}"
    elif isinstance(matrices, Fp4Array):
        if matrices.row_exponent.ndim != matrices.ndim - 2:
            return "w has row scales of its columns, not one of each matrix"
    elif n % 16 or k % 8:
        return f"BF16 matrices of {k} x {n} are not multiples of 8 x 16"
    return empty_refusal(x, w) or triton_bridge.unavailable()


@with_gradient_of(reference.grouped_matmul)
def grouped_matmul(
    x: Float[Array, "r k"] | Fp4Array,
    w: Float[Array, "e k n"] | Fp4Array | TiledFp4Array | Stacked,
    group_sizes: Int32[Array, " e"],
    bias: Float[Array, "e n"] | None = None,
    *,
    activation: Activation | None = None,
) -> Float[Array, "r f"]:
    """See `api.grouped_matmul`. An Fp4Array is tiled first: do that once, where weights are synchronised."""
    if isinstance(w.array if isinstance(w, Stacked) else w, Fp4Array):
        w = tile(w.slice() if isinstance(w, Stacked) else w, gated=activation is not None)
    return launch(x, w, group_sizes, bias, activation=activation)[0]


def compile_cases() -> Iterator[CompileCase]:
    """Gated and plain, BF16 and FP4, from one row a group to many, with biases, and one layer of a stack."""

    def shape(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    for format in (None, NVFP4, MXFP4):
        for rows, experts, k, n, activation, biased in (
            (512, 128, 2048, 1536, "swiglu", False),
            (512, 128, 768, 2048, None, False),
            (4096, 128, 2048, 1536, "swiglu", False),
            (8192, 128, 2048, 1536, "swiglu", False),
            (32768, 128, 2048, 1536, "swiglu", False),
            (256, 32, 2880, 5760, "swiglu", False),
            (256, 32, 2880, 5760, GPT_OSS, True),
            (256, 32, 2880, 2880, None, True),
            (2048, 32, 2880, 5760, GPT_OSS, True),
            (8192, 32, 2880, 5760, GPT_OSS, True),
        ):
            w = shape(experts, k, n)
            if format is not None:
                w = jax.eval_shape(functools.partial(tiled_weights, format, activation is not None), w)
            name = f"grouped_{'bf16' if format is None else format.name}_{rows}x{experts}x{k}x{n}"
            arguments = (shape(rows, k), w, shape(experts, dtype=jnp.int32))
            if biased:
                name, arguments = f"{name}_biased", (*arguments, shape(experts, n))
            yield CompileCase(name, functools.partial(grouped_matmul, activation=activation), arguments)
    layers = Stacked(
        array=jax.eval_shape(functools.partial(tiled_weights, NVFP4, False), shape(4, 8, 256, 256)),
        layer=shape(dtype=jnp.int32),
    )
    yield CompileCase(
        "grouped_layer",
        functools.partial(grouped_matmul, activation=None),
        (shape(8, 256), layers, shape(8, dtype=jnp.int32)),
    )
